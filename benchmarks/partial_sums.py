"""A data-parallel step whose gradients are reduced once, beside the same step that reduces per microbatch.

Two groups of several CPU devices in one process, matrices that are large beside the microbatches, as weights
are where gradients cost most. Between such devices an all-reduce is a copy in memory; over a network the
difference is larger. Fully sharded weights are gathered in every task both ways.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
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

GROUPS = 2
WIDTH, ROWS = 1024, 64
CASES = ((2, 4), (2, 16), (4, 16))
QUICK = ((2, 4),)
HOW = {"replicated weights": ("none", "replicated"), "FSDP": ("none", "all")}


class Steps:
    """Steps with and without partial sums over the same groups; made in a process of its own, by ``Host``."""

    def __init__(self, devices: int, microbatches: int):
        grid = np.array(jax.devices()).reshape(GROUPS, devices)
        self._mesh = mpmd.MpmdMesh(Mesh(grid, ("stage", "data")), "stage")
        numbers = np.random.default_rng(0)
        shapes = [(WIDTH, WIDTH)] * GROUPS
        self._params = [numbers.standard_normal(shape, "float32") / WIDTH for shape in shapes]
        self._xs = numbers.standard_normal((microbatches, ROWS, WIDTH), "float32")
        self._steps: dict[tuple[str, str], Any] = {}
        self._state: dict[tuple[str, str], Any] = {}
        for weights, options in HOW.items():
            for partial_sums in options:
                self._compile(weights, partial_sums)

    def _compile(self, weights: str, partial_sums: Any) -> None:
        specs = (P("data") if weights == "FSDP" else P(), P(None, "data"))
        step = mpmd.mpmd_jit_with_loop(
            tiny.train_step(GROUPS), self._mesh, specs, donate_argnums=0, partial_sums=partial_sums
        )
        key = weights, partial_sums
        self._steps[key] = step.compile(self._params, self._xs)
        # The batch, too, stays: only the step is measured.
        self._state[key] = self._steps[key](self._params, self._xs)[0]

    def measure(self, repetitions: int, seconds: float) -> Mapping[tuple[str, str], list[float]]:
        """Seconds per step, for each way of holding weights and summing."""
        steps = max(2, round(seconds / max(map(self._time, self._steps))))
        things = {str(i): lambda key=key: self._time(key, steps) for i, key in enumerate(self._steps)}
        times = interleaved(things, repetitions)
        return {key: list(times[str(i)]) for i, key in enumerate(self._steps)}

    def _time(self, key: tuple[str, str], steps: int = 1) -> float:
        def run():
            for _ in range(steps):
                self._state[key], loss = self._steps[key](self._state[key], self._xs)
            float(loss)

        return seconds_of(run) / steps

    def close(self) -> None:
        self._mesh.close()


def run(conditions: Conditions) -> Result:
    """Measures each case, and the data-parallel one against what it is meant to save."""
    rows, targets, data = [], [], []
    for devices, microbatches in QUICK if conditions.quick else CASES:
        times = _measure(devices, microbatches, conditions)
        case = f"{devices} devices, {microbatches} microbatches"
        for weights, (without, with_parts) in HOW.items():
            these, those = times[weights, with_parts], times[weights, without]
            cells = (
                f"{np.median(those) * 1e3:.1f}",
                f"{np.median(these) * 1e3:.1f}",
                f"{ratio(these, those):.2f}",
            )
            rows.append((f"{case}, {weights}", *cells))
            data.append({"devices": devices, "microbatches": microbatches, "weights": weights})
            data[-1] |= {"per_microbatch": those, "once": these}
        if devices * GROUPS > 2 * conditions.cores:
            continue  # devices that share cores say little of those that do not
        name = next(iter(HOW))
        with_parts, without = times[name, HOW[name][1]], times[name, HOW[name][0]]
        targets.append(Target(f"{case}: reduced once / per microbatch", ratio(with_parts, without), 1.0))
    header = ("ms per step", "reduced per microbatch", "reduced once", "ratio")
    return Result([Table("Gradients of data-parallel groups", header, tuple(rows))], targets, data)


def _measure(
    devices: int, microbatches: int, conditions: Conditions
) -> Mapping[tuple[str, str], list[float]]:
    environment = cpu_environment(GROUPS * devices, 1)
    host = Host("benchmarks.partial_sums:Steps", (devices, microbatches), environment)
    with contextlib.closing(host):
        host.ready()
        return host.call("measure", conditions.effort.repetitions, conditions.effort.seconds)
