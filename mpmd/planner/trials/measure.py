"""Measures the tasks of a step that is only planned, on this process's devices.

No pipeline runs. Each group runs its program by itself (``rehearsal.py``), so the devices of one group are
enough for all groups, and of groups with equal executables one is run. The results are the times for the
simulator, and the memory that XLA needs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from mpmd.ir.events import Event
from mpmd.ir.executable_memory import ExecutableMemory
from mpmd.ir.plan import Executable, OutsideTask, Plan, Spec, TaskKind, TaskType
from mpmd.planner.trials.rehearsal import Rehearsal
from mpmd.program import Function, Program
from mpmd.runtime.compiling import compile_executable, compile_with_open_specs, memory_of
from mpmd.runtime.resolve_specs import resolve_specs
from mpmd.simulate import Costs
from mpmd.simulate.costs import types_of
from mpmd.step.planned_step import PlannedStep

LEAST_CALLS = 5
MOST_WARM_UPS = 6
STEADY = 0.95
"""A call that takes more than this share of the time of the quickest one before it is no warm-up."""

Axes = Mapping[str, int]

Result = TypeVar("Result")


class MeasuredTasks(NamedTuple):
    """Measurements of a step's tasks.

    Attributes:
      plan: of the step, with the shardings that XLA has chosen and the memory of each executable.
      seconds: the seconds of each executable, by group and name, while its group is at work by itself;
        without the time between tasks and between groups.
    """

    plan: Plan
    seconds: Mapping[tuple[int, str], float]


def measure_tasks(
    step: PlannedStep, devices: Sequence[jax.Device] | None = None, seconds: float = 0.2
) -> MeasuredTasks:
    """Compiles and times each executable of a step.

    Arguments and messages have the right shapes, dtypes and shardings, and arbitrary values.

    Args:
      devices: devices of the kind that the step is to run on, at least as many as the largest group has; by
        default the devices of this process.
      seconds: for about how long each group runs its program, five times at least, after a warm-up.

    Raises: ``ValueError`` when there are too few devices, and for a step whose tasks call back into Python.
    """
    program, devices = step.compiled.program, jax.local_devices() if devices is None else list(devices)
    axes = [dict(group.axes) for group in step.topology.groups]
    _check(program, axes, len(devices))
    bench = _Bench(axes, devices)
    program = resolve_specs(program, bench.choose_specs)
    seconds_of = bench.times(program, seconds)
    executables = tuple(
        dataclasses.replace(e, memory=bench.memory.get(e.name)) for e in program.plan.executables
    )
    return MeasuredTasks(dataclasses.replace(program.plan, executables=executables), seconds_of)


def _take_over(times: dict[tuple[int, str], float], mpmd_idx: int, plan: Plan, axes: Sequence[Axes]) -> bool:
    """Copies the times of a group from groups of its shape, if these have run all its executables."""
    known = {name: time for (other, name), time in times.items() if axes[other] == axes[mpmd_idx]}
    names = [executable.name for executable in plan.executables_of(mpmd_idx)]
    if not known.keys() >= set(names):
        return False
    times |= {(mpmd_idx, name): known[name] for name in names}
    return True


def costs_of(plan: Plan, seconds: Mapping[tuple[int, str], float]) -> Costs:
    """Returns the costs of tasks from the ``seconds`` of each executable on each group.

    Tasks of a kind and stage may have several executables, such as for the microbatch that comes first:
    their time is the mean over the tasks.
    """
    cells: dict[tuple[TaskType, ...], list[float]] = collections.defaultdict(list)
    outside: dict[tuple[int, OutsideTask], float] = {}
    for program in plan.programs:
        for run in program.runs:
            duration = seconds[program.mpmd_idx, run.executable]
            if isinstance(run.task, OutsideTask):
                outside[program.mpmd_idx, run.task] = duration
            else:
                cells[types_of(run.task)].append(duration)
    means = {types: statistics.fmean(times) for types, times in cells.items()}
    fused = {types: mean for types, mean in means.items() if len(types) > 1}
    tasks = {types[0]: mean for types, mean in means.items() if len(types) == 1}
    for types, duration in fused.items():
        for member in types:
            tasks.setdefault(member, duration / len(types))  # of a cell that is never divided
    kinds: dict[TaskKind, list[float]] = collections.defaultdict(list)
    for (kind, _), mean in tasks.items():
        kinds[kind].append(mean)
    means_of_kinds = {kind: statistics.fmean(times) for kind, times in kinds.items()}
    return Costs(kinds=means_of_kinds, tasks=tasks, fused=fused, outside=outside)


def _check(program: Program, axes: Sequence[Mapping[str, int]], available: int) -> None:
    faults = [
        f"group {group} has {needed} devices, and there are {available}: measure where there are as many, or "
        "give more devices"
        for group, of_group in enumerate(axes)
        if (needed := math.prod(of_group.values())) > available
    ]
    if program.python_calls:
        calls = "\n  ".join(program.python_calls)
        faults.append(f"to time the step's tasks would call these functions of Python:\n  {calls}")
    if faults:
        raise ValueError("\n".join(faults))


class _Bench:
    def __init__(self, axes: Sequence[Axes], devices: Sequence[jax.Device]):
        self._axes, self._devices = axes, devices
        self.memory: dict[str, ExecutableMemory] = {}

    def _submesh(self, mpmd_idx: int) -> jax.sharding.Mesh:
        axes = self._axes[mpmd_idx]
        devices = np.array(self._devices[: math.prod(axes.values())])
        return jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes))

    def choose_specs(
        self, mpmd_idx: int, executable: Executable, function: Function
    ) -> Future[tuple[Spec, ...]]:
        future: Future[tuple[Spec, ...]] = Future()
        future.set_result(compile_with_open_specs(executable, function, self._submesh(mpmd_idx))[1])
        return future

    def times(self, program: Program, seconds: float) -> dict[tuple[int, str], float]:
        times: dict[tuple[int, str], float] = {}
        for mpmd_idx in range(len(self._axes)):
            if not _take_over(times, mpmd_idx, program.plan, self._axes):
                submesh = self._submesh(mpmd_idx)
                rehearsal = Rehearsal(program, mpmd_idx, submesh, self._compiled(program, mpmd_idx, submesh))
                warm_up(functools.partial(_seconds_of_step, rehearsal))
                steps = repeat(rehearsal.step, seconds)
                times |= {(mpmd_idx, name): typical for name, typical in typical_seconds(steps).items()}
        return times

    def _compiled(
        self, program: Program, mpmd_idx: int, submesh: jax.sharding.Mesh
    ) -> dict[str, jax.stages.Compiled]:
        compiled = {}
        for executable in program.plan.executables_of(mpmd_idx):
            name = executable.name
            compiled[name] = compile_executable(executable, program.functions[name], submesh)
            if needed := memory_of(compiled[name]):
                self.memory[name] = self.memory.get(name, needed) | needed
        return compiled


def _seconds_of_step(rehearsal: Rehearsal) -> float:
    return sum(event.duration for _, event in rehearsal.step())


def typical_seconds(steps: Iterable[Sequence[tuple[str, Event]]]) -> dict[str, float]:
    """The typical seconds of each executable: the median over steps of the mean within a step.

    So a step that something else has disturbed does not count, and effects that occur in every step do.

    Args:
      steps: the tasks of each, with the names of their executables.
    """
    means: dict[str, list[float]] = collections.defaultdict(list)
    for step in steps:
        of_step: dict[str, list[float]] = collections.defaultdict(list)
        for name, event in step:
            of_step[name].append(event.duration)
        for name, durations in of_step.items():
            means[name].append(statistics.fmean(durations))
    return {name: statistics.median(of_steps) for name, of_steps in means.items()}


def warm_up(call: Callable[[], float]) -> None:
    """Repeats a call until it is no longer quicker than before, ``MOST_WARM_UPS`` times at most.

    The first calls of a process fill caches and get memory from the system.

    Args:
      call: returns its seconds.
    """
    quickest = math.inf
    for _ in range(MOST_WARM_UPS):
        seconds = call()
        if seconds > STEADY * quickest:
            break
        quickest = seconds


def repeat(call: Callable[[], Result], seconds: float) -> list[Result]:
    results, end = list[Result](), time.perf_counter() + seconds
    while len(results) < LEAST_CALLS or time.perf_counter() < end:
        results.append(call())
    return results
