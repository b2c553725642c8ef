"""Large plans, and what a step costs the driver, whatever the groups have to do."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ray

import mpmd
from benchmarks import tiny
from benchmarks.host import Host
from benchmarks.measure import Conditions, Effort, Result, Table, Target, interleaved, ratio
from benchmarks.peers import cpu_environment
from mpmd.compiler.pipeline import compile_step
from mpmd.compiler.request import CompileRequest
from mpmd.verify import verify

PLANS = {(16, 64): 3, (32, 128): 3, (64, 512): 1}
"""Groups and microbatches, and how often to plan for them."""

QUICK_PLANS = {(16, 64): 3}
MICROBATCHES = (4, 32, 128, 512)
GROUPS = (2, 4)
QUICK_GROUPS = (2,)
STEPS_EACH = 10

Size = tuple[int, int]
"""Groups and microbatches."""


class Planner:
    """Plans steps without running them; made in a process of its own, by ``Host``."""

    def plan(self, groups: int, microbatches: int) -> dict[str, float]:
        """Seconds to plan and verify, of which to verify; and the instructions of the plan."""
        mesh = tiny.in_process_mesh(groups)
        args = tiny.arguments(groups, microbatches, microbatches)
        donated = [True] * groups + [False]
        jax.clear_caches()
        start = time.perf_counter()
        step, submeshes = tiny.train_step(groups), mesh.abstract_submeshes
        compiled = compile_step(CompileRequest(step, args, {}, submeshes=submeshes, donated=donated))
        plan = compiled.program.plan
        planned = time.perf_counter()
        verify(plan)
        verified = time.perf_counter()
        instructions = sum(len(program.instructions) for program in plan.programs)
        return {
            "seconds": planned - start,
            "verify_seconds": verified - planned,
            "instructions": instructions,
        }

    def close(self) -> None:
        pass


class Driver:
    """A loaded step for each number of microbatches, of the same batch; made by ``Host``."""

    def __init__(self, groups: int, ray_address: str):
        self._mesh = tiny.open_mesh(groups, ray_address)
        function = mpmd.jit(tiny.train_step(groups), self._mesh, donate_argnums=0)
        self._steps: dict[int, Any] = {}
        self._arguments: dict[int, Any] = {}
        for count in MICROBATCHES:
            self._arguments[count] = tiny.arguments(groups, count, max(MICROBATCHES))
            self._steps[count] = function.compile(*self._arguments[count])
            self.call_seconds(count)

    def call_seconds(self, microbatches: int) -> float:
        """Seconds that a call of the step keeps the thread that makes it busy: a mean over steps in a row."""
        params, xs = self._arguments[microbatches]
        start = time.thread_time()
        for _ in range(STEPS_EACH):
            params, _ = self._steps[microbatches](params, xs)
        seconds = (time.thread_time() - start) / STEPS_EACH
        for param in params:
            param.block_until_ready()
        self._arguments[microbatches] = params, xs
        return seconds

    def close(self) -> None:
        self._mesh.close()
        ray.shutdown()


def run(conditions: Conditions) -> Result:
    quick, effort = conditions.quick, conditions.effort
    plans = _plans(QUICK_PLANS if quick else PLANS)
    drivers = {
        f"{groups} groups {where}": _driver(groups, address, effort)
        for groups in (QUICK_GROUPS if quick else GROUPS)
        for where, address in (("in process", ""), ("on Ray", conditions.ray_address))
    }
    (groups, microbatches), seconds = list(plans.items())[-1]
    targets = [Target(f"plan and verify {groups} x {microbatches}, seconds", seconds["seconds"], 5.0)]
    few, many = min(MICROBATCHES), max(MICROBATCHES)
    for name, times in drivers.items():
        growth = ratio(times[str(many)], times[str(few)])
        targets.append(Target(f"driver, {name}: {many} / {few} microbatches", growth, 1.2))
    data = {"plans": {f"{g} x {m}": found for (g, m), found in plans.items()}, "driver_seconds": drivers}
    return Result([_plan_table(plans), _driver_table(drivers)], targets, data)


def _plans(sizes: Mapping[Size, int]) -> dict[Size, dict[str, float]]:
    most = max(groups for groups, _ in sizes)
    host = Host("benchmarks.scale:Planner", (), cpu_environment(most, 1))
    with contextlib.closing(host):
        host.ready()
        host.call("plan", *min(sizes))  # the first one imports
        found = {}
        for size, repetitions in sizes.items():
            repeated = [host.call("plan", *size) for _ in range(repetitions)]
            found[size] = {name: statistics.median(r[name] for r in repeated) for name in repeated[0]}
        return found


def _driver(groups: int, ray_address: str, effort: Effort) -> dict[str, Sequence[float]]:
    environment = cpu_environment(1 if ray_address else groups, 1)
    host = Host("benchmarks.scale:Driver", (groups, ray_address), environment)
    with contextlib.closing(host):
        host.ready()
        return interleaved(
            {str(count): functools.partial(host.call, "call_seconds", count) for count in MICROBATCHES},
            effort.repetitions,
        )


def _plan_table(plans: Mapping[Size, Mapping[str, float]]) -> Table:
    rows = [
        (
            f"{groups} groups, {microbatches} microbatches",
            f"{found['instructions']:,}",
            f"{found['seconds']:.2f}",
            f"{found['verify_seconds']:.2f}",
        )
        for (groups, microbatches), found in plans.items()
    ]
    return Table("Planning", ("", "instructions", "plan and verify, s", "verify, s"), tuple(rows))


def _driver_table(drivers) -> Table:
    rows = [
        (name, *(f"{statistics.median(times[str(count)]) * 1e6:.0f}" for count in MICROBATCHES))
        for name, times in drivers.items()
    ]
    header = ("driver: us per step, for this many microbatches", *map(str, MICROBATCHES))
    return Table("The driver's time", header, tuple(rows))
