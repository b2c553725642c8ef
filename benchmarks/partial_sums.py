"""The traffic between a group's devices in every microbatch, beside that of the same step once per step.

Two groups of several CPU devices in one process, matrices that are large beside the microbatches, as weights
are where gradients cost most. Between such devices a collective is a copy in memory; over a network the
difference is larger. The bytes are those of the results of collectives on one device of each group, in the
programs that XLA compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mpmd
from benchmarks import tiny
from benchmarks.host import Host
from benchmarks.measure import Conditions, Result, Table, Target, interleaved, ratio, seconds_of
from benchmarks.peers import cpu_environment
from mpmd.step.loaded_step import LoadedStep
from tests.support.collectives import collectives_of

GROUPS = 2
WIDTH, ROWS = 1024, 64
CASES = ((2, 4), (2, 16), (4, 16))
QUICK = ((2, 4),)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to hold weights, with what is done once per step. Ratios are to the first way to hold them so."""

    name: str
    spec: tuple[str, ...]
    partial_sums: Any
    gather: Any = "task"


DATA_PARALLEL = (
    Way("data parallel, reduced per microbatch", (), "none"),
    Way("data parallel, reduced once", (), "replicated"),
)
FULLY_SHARDED = (
    Way("ZeRO-3: gathered per task, reduced per microbatch", ("data",), "replicated"),
    Way("gathered per task, reduced once", ("data",), "all"),
    Way("ZeRO-2: gathered once, reduced per microbatch", ("data",), "replicated", "step"),
    Way("ZeRO-1: gathered once, reduced once", ("data",), "all", "step"),
)
WAYS = (*DATA_PARALLEL, *FULLY_SHARDED)


class Steps:
    """The same step in all ways over the same groups; made in a process of its own, by ``Host``."""

    def __init__(self, devices: int, microbatches: int):
        grid = np.array(jax.devices()).reshape(GROUPS, devices)
        self._mesh = mpmd.MpmdMesh(Mesh(grid, ("stage", "data")), "stage")
        numbers = np.random.default_rng(0)
        shapes = [(WIDTH, WIDTH)] * GROUPS
        params = [numbers.standard_normal(shape, "float32") / WIDTH for shape in shapes]
        self._microbatches = microbatches
        self._xs = numbers.standard_normal((microbatches, ROWS, WIDTH), "float32")
        self._steps = [self._compiled(way, params) for way in WAYS]
        # The batch, too, stays: only the step is measured.
        self._state = [step(params, self._xs)[0] for step in self._steps]

    def _compiled(self, way: Way, params: list[np.ndarray]) -> LoadedStep:
        step = mpmd.jit(
            tiny.train_step(GROUPS),
            self._mesh,
            (P(*way.spec), P(None, "data")),
            donate_argnums=0,
            partial_sums=way.partial_sums,
            gather=way.gather,
        )
        return step.compile(params, self._xs)

    def measure(self, repetitions: int, seconds: float) -> list[list[float]]:
        """Seconds per step, for each way."""
        steps = max(2, round(seconds / max(map(self._time, range(len(WAYS))))))
        things = {str(i): lambda i=i: self._time(i, steps) for i in range(len(WAYS))}
        times = interleaved(things, repetitions)
        return [list(times[str(i)]) for i in range(len(WAYS))]

    def _time(self, i: int, steps: int = 1) -> float:
        def run():
            for _ in range(steps):
                self._state[i], loss = self._steps[i](self._state[i], self._xs)
            float(loss)

        return seconds_of(run) / steps

    def collectives(self) -> list[tuple[float, int]]:
        """For each way the bytes of collectives in a microbatch, and of those outside the loop in a step."""
        return [self._bytes_of(step) for step in self._steps]

    def _bytes_of(self, step: LoadedStep) -> tuple[float, int]:
        in_loop, outside = collectives_of(step, self._mesh)
        runs = [run for program in step.plan.programs for run in program.runs]
        in_step, once = (
            sum(found.nbytes for run in runs for found in executables.get(run.executable, ()))
            for executables in (in_loop, outside)
        )
        return in_step / self._microbatches, once

    def close(self) -> None:
        self._mesh.close()


def run(conditions: Conditions) -> Result:
    """Measures each case, and the data-parallel one against what it is meant to save."""
    tables, targets, data = [], [], []
    for devices, microbatches in QUICK if conditions.quick else CASES:
        times, collectives = _measure(devices, microbatches, conditions)
        case = f"{devices} devices, {microbatches} microbatches"
        rows = []
        for i, (way, (in_microbatch, outside)) in enumerate(zip(WAYS, collectives, strict=True)):
            first = next(j for j, other in enumerate(WAYS) if other.spec == way.spec)
            in_step = in_microbatch * microbatches + outside
            megabytes = (f"{nbytes / 2**20:.1f}" for nbytes in (in_microbatch, outside, in_step))
            compared = f"{ratio(times[i], times[first]):.2f}"
            rows.append((way.name, *megabytes, f"{np.median(times[i]) * 1e3:.1f}", compared))
            data.append({"devices": devices, "microbatches": microbatches, **dataclasses.asdict(way)})
            data[-1] |= {"seconds": times[i], "bytes": {"in_microbatch": in_microbatch, "outside": outside}}
        header = (case, "MiB per microbatch", "once", "per step", "ms per step", "ratio")
        tables.append(Table(f"Collectives of {GROUPS} groups of {devices} devices", header, tuple(rows)))
        if devices * GROUPS > 2 * conditions.cores:
            continue  # devices that share cores say little of those that do not
        reduced, reduced_once = times[: len(DATA_PARALLEL)]
        targets.append(Target(f"{case}: reduced once / per microbatch", ratio(reduced_once, reduced), 1.0))
    return Result(tables, targets, data)


def _measure(
    devices: int, microbatches: int, conditions: Conditions
) -> tuple[list[list[float]], list[tuple[float, int]]]:
    environment = cpu_environment(GROUPS * devices, 1)
    host = Host("benchmarks.partial_sums:Steps", (devices, microbatches), environment)
    with contextlib.closing(host):
        host.ready()
        times = host.call("measure", conditions.effort.repetitions, conditions.effort.seconds)
        return times, host.call("collectives")
