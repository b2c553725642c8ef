"""The time to start, phase by phase, without and with JAX's persistent compilation cache.

A process that has never run anything launches the groups on Ray, compiles a train step and runs it once:
first with an empty cache, then again with what the first run has left there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence

import cluster
import mpmd
from benchmarks import model
from benchmarks.host import Host
from benchmarks.measure import Conditions, Result, Table, Target
from benchmarks.peers import cpu_environment
from benchmarks.peers.ours import START_SECONDS
from benchmarks.throughput import workload
from benchmarks.workload import Workload

WORKLOAD = workload(groups=4, microbatches=8)
RUNS_WITH_FULL_CACHE = 2
PLANNING, XLA = "trace, split, place, lower, verify", "of which XLA, slowest group"
_APART = ("export", "load")


@dataclasses.dataclass(frozen=True)
class Start:
    """The seconds of each phase, in the order in which they came, and the loss of the step."""

    seconds: Mapping[str, float]
    loss: float

    @property
    def total(self) -> float:
        return sum(seconds for phase, seconds in self.seconds.items() if phase != XLA)


class Starter:
    """Starts once; made in a process of its own, by ``Host``."""

    def start(self, workload: Workload, ray_address: str, cache: str) -> Start:
        """Launches, compiles, and runs a step, with a directory for the groups' compilation cache."""
        state, batch = model.init_state(workload), model.batch(workload)
        with cluster.launch(
            {"stage": workload.groups},
            "stage",
            address=ray_address,
            runtime_env={"env_vars": {"JAX_COMPILATION_CACHE_DIR": cache}},  # not the one of all suites
            timeout=START_SECONDS,
        ) as mesh:
            function = mpmd.jit(model.train_step(workload), mesh, donate_argnums=0)
            step = function.compile(state, *batch)
            start = time.perf_counter()
            state, loss = step(state, *batch)
            value = float(loss)
            first_step = time.perf_counter() - start
        report = step.report()
        passes = report.seconds
        seconds = {f"launch: {phase}": seconds for phase, seconds in mesh.seconds.items()}
        seconds[PLANNING] = sum(seconds for name, seconds in passes.items() if name not in _APART)
        seconds |= {name: passes[name] for name in _APART}
        seconds[XLA] = max(group.xla_seconds for group in report.groups)
        seconds["first step"] = first_step
        return Start(seconds, value)

    def close(self) -> None:
        pass


def run(conditions: Conditions) -> Result:
    with tempfile.TemporaryDirectory() as cache:
        first, *again = [_start(conditions, cache) for _ in range(1 + RUNS_WITH_FULL_CACHE)]
    losses = [start.loss for start in (first, *again)]
    if len(set(losses)) > 1:
        raise RuntimeError(f"the losses with an empty and with a full cache differ: {losses}")
    table = _table(first, again)
    load = first.seconds["load"] / statistics.median(start.seconds["load"] for start in again)
    target = Target(f"starting, {WORKLOAD}: load, empty / full cache", load, 3.0, at_least=True)
    starts = [dataclasses.asdict(start) for start in (first, *again)]
    data = {"workload": dataclasses.asdict(WORKLOAD), "starts": starts}
    return Result([table], [target], data)


def _start(conditions: Conditions, cache: str) -> Start:
    host = Host("benchmarks.startup:Starter", (), cpu_environment(1, conditions.cores))
    with contextlib.closing(host):
        host.ready()
        return host.call("start", WORKLOAD, conditions.ray_address, cache)


def _table(first: Start, again: Sequence[Start]) -> Table:
    rows = [
        _row(phase, seconds, [start.seconds[phase] for start in again])
        for phase, seconds in first.seconds.items()
    ]
    rows.append(_row("all", first.total, [start.total for start in again]))
    header = (f"seconds; {WORKLOAD}, {WORKLOAD.layers} layers", "empty cache", "full cache", "ratio")
    return Table("Starting", header, tuple(rows))


def _row(phase: str, first: float, again: Sequence[float]) -> tuple[str, ...]:
    later = statistics.median(again)
    return phase, f"{first:.2f}", f"{later:.2f}", f"{first / later:.1f}"
