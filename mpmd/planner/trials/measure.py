"""Measures the tasks of a step that is only planned: each executable by itself, on this process's devices.

No pipeline runs: the devices of one group are enough for all groups, and executables that are equal, as those
of equal stages, are timed once. What comes out is what the simulator needs, and what XLA needs.

CPU devices share their host: its cores, caches and memory. On those an executable runs on the devices of as
many groups at the same time as there are devices for. An accelerator has what it computes with for itself.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.executable_memory import ExecutableMemory
from mpmd.ir import Aval, Executable, OutsideTask, Plan, Spec, TaskKind, TaskType
from mpmd.planned_step import PlannedStep
from mpmd.planner.trials.timing import Call, seconds_together
from mpmd.program import Function, Program
from mpmd.runtime.compiling import compile_executable, compile_with_open_specs, memory_of
from mpmd.runtime.resolve_specs import resolve_specs
from mpmd.sharding import to_sharding
from mpmd.simulate import Costs
from mpmd.simulate.costs import types_of

_Key = tuple[str, tuple[tuple[str, int], ...]]
"""An executable by its name, with the axes of the submesh that it is compiled for."""


@dataclasses.dataclass(frozen=True)
class MeasuredTasks:
    """What was measured of a step's tasks.

    Attributes:
      plan: the step's, with the shardings that XLA has chosen and with what XLA needs to run each executable.
      seconds: of each executable, by group and name, while as many groups as ``together`` says for the group
        were at work; without what goes on between tasks and between groups.
    """

    plan: Plan
    seconds: Mapping[tuple[int, str], float]
    together: tuple[int, ...]


def measure_tasks(
    step: PlannedStep, devices: Sequence[jax.Device] | None = None, seconds: float = 0.1
) -> MeasuredTasks:
    """Compiles and times each executable of a step.

    Its inputs have the right shapes, dtypes and shardings, and arbitrary values. The time of a task is the
    median of several runs, each of which is waited for.

    Args:
      devices: of one node, of the kind that the step is to run on, at least as many as the largest group has;
        by default those of this process.
      seconds: for which each executable is run, about; three times at least.

    Raises: ``ValueError`` when there are too few devices, and for a step whose tasks call back into Python.
    """
    program, devices = step.compiled.program, jax.local_devices() if devices is None else list(devices)
    axes = [dict(group.axes) for group in step.topology.groups]
    _check(program, axes, len(devices))
    bench = _Bench([_submeshes(devices, of_group, len(axes)) for of_group in axes])
    resolved = resolve_specs(program, bench.choose_specs)
    plan, times = resolved.plan, {}
    for mpmd_idx in range(len(plan.programs)):
        for executable in plan.executables_of(mpmd_idx):
            function = resolved.functions[executable.name]
            times[mpmd_idx, executable.name] = bench.seconds_of(mpmd_idx, executable, function, seconds)
    needed = bench.memory
    executables = tuple(dataclasses.replace(e, memory=needed.get(e.name)) for e in plan.executables)
    return MeasuredTasks(dataclasses.replace(plan, executables=executables), times, bench.together)


def costs_of(plan: Plan, seconds: Mapping[tuple[int, str], float]) -> Costs:
    """The costs of tasks whose executables take so many seconds on each group.

    Tasks of a kind and stage may have several executables, such as for the microbatch that comes first: their
    time is the mean over the tasks.
    """
    cells: dict[tuple[TaskType, ...], list[float]] = collections.defaultdict(list)
    outside: dict[tuple[int, OutsideTask], float] = {}
    for program in plan.programs:
        for run in program.runs:
            taken = seconds[program.mpmd_idx, run.executable]
            if isinstance(run.task, OutsideTask):
                outside[program.mpmd_idx, run.task] = taken
            else:
                cells[types_of(run.task)].append(taken)
    means = {types: statistics.fmean(times) for types, times in cells.items()}
    fused = {types: mean for types, mean in means.items() if len(types) > 1}
    tasks = {types[0]: mean for types, mean in means.items() if len(types) == 1}
    for types, taken in fused.items():
        for member in types:
            tasks.setdefault(member, taken / len(types))  # of a cell that is never divided
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


def _submeshes(
    devices: Sequence[jax.Device], axes: Mapping[str, int], groups: int
) -> list[jax.sharding.Mesh]:
    """Those on which groups of such a shape are at work at the same time; the first devices are first."""
    size = math.prod(axes.values())
    together = min(groups, len(devices) // size) if _share_host(devices) else 1
    taken = np.array(devices[: together * size]).reshape(together, *axes.values())
    return [jax.sharding.Mesh(of_group, tuple(axes)) for of_group in taken]


def _share_host(devices: Sequence[jax.Device]) -> bool:
    """Whether devices compute on the cores of their host, with its caches and memory."""
    return all(device.platform == "cpu" for device in devices)


class _Bench:
    """Compiles and times executables, equal ones once.

    Args:
      submeshes: for each group, those on which its executables run at the same time.
    """

    def __init__(self, submeshes: Sequence[Sequence[jax.sharding.Mesh]]):
        self._submeshes = submeshes
        self._seconds: dict[_Key, float] = {}
        self.memory: dict[str, ExecutableMemory] = {}

    @property
    def together(self) -> tuple[int, ...]:
        """How many groups were at work while the executables of a group were timed."""
        return tuple(map(len, self._submeshes))

    def choose_specs(
        self, mpmd_idx: int, executable: Executable, function: Function
    ) -> Future[tuple[Spec, ...]]:
        """What XLA chooses for an executable's open output specs."""
        future: Future[tuple[Spec, ...]] = Future()
        future.set_result(compile_with_open_specs(executable, function, self._submeshes[mpmd_idx][0])[1])
        return future

    def seconds_of(self, mpmd_idx: int, executable: Executable, function: Function, seconds: float) -> float:
        """The seconds that an executable takes on a group."""
        submeshes = self._submeshes[mpmd_idx]
        key = (executable.name, tuple(submeshes[0].shape.items()))
        if key not in self._seconds:
            calls = [self._call(executable, function, submesh) for submesh in submeshes]
            self._seconds[key] = seconds_together(calls, seconds)
        return self._seconds[key]

    def _call(self, executable: Executable, function: Function, submesh: jax.sharding.Mesh) -> Call:
        compiled = compile_executable(executable, function, submesh)
        if needed := memory_of(compiled):
            before = self.memory.get(executable.name, needed)
            self.memory[executable.name] = before | needed
        shardings = [to_sharding(spec or (), submesh) for spec in executable.in_specs]
        inputs = list(map(_some_values, executable.inputs, shardings))
        return Call(compiled, inputs, executable.donated)


def _some_values(aval: Aval, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array of small numbers: equal ones would take some devices less power, and so less time."""
    dtype = jnp.dtype(aval.dtype)
    numbers = np.random.default_rng(0)
    if jnp.issubdtype(dtype, jnp.inexact):
        pattern = (0.1 * numbers.standard_normal(4093)).astype(dtype)
    else:
        pattern = numbers.integers(0, 2 if jnp.issubdtype(dtype, jnp.bool) else 128, 4093).astype(dtype)
    return jax.device_put(np.resize(pattern, aval.shape), sharding)
