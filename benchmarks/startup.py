"""Seconds to start, phase by phase, without and with JAX's persistent compilation cache.

A process that has never run anything launches the groups on Ray, compiles a train step and runs it once:
first with an empty cache, then again with the cache that the first run has filled.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import cluster
import mpmd
from benchmarks import model
from benchmarks.frame import START_SECONDS, Limited, Rows, Setup
from benchmarks.host import Host
from benchmarks.workload import small

WORKLOAD = small(groups=4, microbatches=8)
RUNS_WITH_FULL_CACHE = 2
LOAD, XLA, ALL = "load", "of which XLA, slowest group", "all"
LEAST_GAIN = 3.0


class Starter:
    """Starts once; made in a process of its own, by ``Host``."""

    def start(self, setup: Setup, cache: str) -> tuple[dict[str, float], float]:
        """Launches, compiles, and runs a step with this directory as the groups' compilation cache.

        Returns: the seconds of each phase, and the loss of the step.
        """
        state, batch = model.init_state(WORKLOAD), model.batch(WORKLOAD)
        variables = {"env_vars": {"JAX_COMPILATION_CACHE_DIR": cache}}  # not the one of all benchmarks
        with cluster.launch(
            {"stage": WORKLOAD.groups},
            "stage",
            address=setup.ray_address,
            runtime_env=variables,
            timeout=START_SECONDS,
        ) as mesh:
            step = mpmd.jit(model.train_step(WORKLOAD), mesh, donate_argnums=0).compile(state, *batch)
            start = time.perf_counter()
            loss = float(step(state, *batch)[1])
            first_step = time.perf_counter() - start
        report = step.report()
        seconds = {f"launch: {phase}": seconds for phase, seconds in mesh.seconds.items()}
        last = {name: report.seconds[name] for name in ("export", LOAD)}
        seconds["all passes"] = sum(report.seconds.values()) - sum(last.values())
        seconds |= last | {"first step": first_step}
        seconds[ALL] = sum(seconds.values())
        seconds[XLA] = max(group.xla_seconds or 0.0 for group in report.groups)
        return seconds, loss


def run(setup: Setup) -> Rows:
    setup.join_ray()
    with tempfile.TemporaryDirectory() as cache:
        starts = []
        for _ in range(1 + RUNS_WITH_FULL_CACHE):
            with Host("benchmarks.startup:Starter", (), setup.environment(1, setup.cores)) as host:
                starts.append(host.call("start", setup, cache))
    losses = {loss for _, loss in starts}
    if len(losses) > 1:
        raise RuntimeError(f"the losses with an empty and with a full cache differ: {losses}")
    (first, _), *again = starts
    for phase, seconds in first.items():
        later = [of_phase[phase] for of_phase, _ in again]
        gain = seconds / statistics.median(later)
        yield (
            f"Starting {WORKLOAD}, {WORKLOAD.layers} layers",
            {
                "s": phase,
                "empty cache": seconds,
                "full cache": later,
                "ratio": Limited(gain, LEAST_GAIN, at_least=True) if phase == LOAD else gain,
            },
        )
