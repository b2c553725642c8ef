"""Measures the tasks of a step that is only planned: each executable by itself, on this process's devices.

No pipeline runs: the devices of one group are enough for all groups, and executables that are equal, as those
of equal stages, are compiled and timed once. What comes out is what the simulator needs, and what XLA needs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.executable_memory import ExecutableMemory
from mpmd.ir import Aval, Executable, OutsideTask, Plan, Spec, TaskKind, TaskType
from mpmd.planned_step import PlannedStep
from mpmd.program import Function, Program
from mpmd.runtime.compiling import compile_executable, compile_with_open_specs, memory_of
from mpmd.runtime.resolve_specs import resolve_specs
from mpmd.sharding import to_sharding
from mpmd.simulate import Costs
from mpmd.simulate.costs import types_of

LEAST_RUNS = 3
MOST_RUNS = 1000

_Key = tuple[str, tuple[tuple[str, int], ...]]
"""An executable by its name, with the axes of the submesh that it is compiled for."""


@dataclasses.dataclass(frozen=True)
class MeasuredTasks:
    """What was measured of a step's tasks.

    Attributes:
      plan: the step's, with the shardings that XLA has chosen and with what XLA needs to run each executable.
      costs: the seconds of each task, without what goes on between tasks and between groups.
    """

    plan: Plan
    costs: Costs


def measure_tasks(
    step: PlannedStep, devices: Sequence[jax.Device] | None = None, seconds: float = 0.2
) -> MeasuredTasks:
    """Compiles and times each executable of a step by itself.

    Its inputs have the right shapes, dtypes and shardings, and arbitrary values. The time of a task is the
    median of several runs, each of which is waited for.

    Args:
      devices: as many as the largest group has, of the kind that the step is to run on; by default those of
        this process.
      seconds: for which each executable is run, about; three times at least.

    Raises: ``ValueError`` when there are too few devices, and for a step whose tasks call back into Python.
    """
    program, devices = step.compiled.program, jax.local_devices() if devices is None else list(devices)
    axes = [dict(group.axes) for group in step.topology.groups]
    _check(program, axes, len(devices))
    bench = _Bench([_submesh(devices, of_group) for of_group in axes])
    resolved = resolve_specs(program, bench.choose_specs)
    plan, times = resolved.plan, {}
    for mpmd_idx in range(len(plan.programs)):
        for executable in plan.executables_of(mpmd_idx):
            function = resolved.functions[executable.name]
            times[mpmd_idx, executable.name] = bench.seconds_of(mpmd_idx, executable, function, seconds)
    needed = bench.memory
    executables = tuple(dataclasses.replace(e, memory=needed.get(e.name)) for e in plan.executables)
    return MeasuredTasks(dataclasses.replace(plan, executables=executables), costs_of(plan, times))


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


def _submesh(devices: Sequence[jax.Device], axes: Mapping[str, int]) -> jax.sharding.Mesh:
    taken = np.array(devices[: math.prod(axes.values())])
    return jax.sharding.Mesh(taken.reshape(tuple(axes.values())), tuple(axes))


class _Bench:
    """Compiles and times executables, equal ones once."""

    def __init__(self, submeshes: Sequence[jax.sharding.Mesh]):
        self._submeshes = submeshes
        self._seconds: dict[_Key, float] = {}
        self.memory: dict[str, ExecutableMemory] = {}

    def choose_specs(
        self, mpmd_idx: int, executable: Executable, function: Function
    ) -> Future[tuple[Spec, ...]]:
        """What XLA chooses for an executable's open output specs."""
        future: Future[tuple[Spec, ...]] = Future()
        future.set_result(compile_with_open_specs(executable, function, self._submeshes[mpmd_idx])[1])
        return future

    def seconds_of(self, mpmd_idx: int, executable: Executable, function: Function, seconds: float) -> float:
        """The seconds that an executable takes on a group."""
        submesh = self._submeshes[mpmd_idx]
        key = (executable.name, tuple(submesh.shape.items()))
        if key not in self._seconds:
            compiled = compile_executable(executable, function, submesh)
            if needed := memory_of(compiled):
                before = self.memory.get(executable.name, needed)
                self.memory[executable.name] = before | needed
            shardings = [to_sharding(spec or (), submesh) for spec in executable.in_specs]
            inputs = list(map(_some_values, executable.inputs, shardings))
            self._seconds[key] = time_call(compiled, inputs, executable.donated, seconds)
        return self._seconds[key]


def time_call(
    call: Callable[..., Sequence[jax.Array]],
    inputs: Sequence[jax.Array],
    donated: Sequence[int],
    seconds: float,
) -> float:
    """The median of the seconds that a call takes, until its results are there.

    Args:
      donated: the inputs that each call takes over; it gets copies of them.
      seconds: for which to call it, about.
    """
    times: list[float] = []
    _once(call, inputs, donated)  # the first run is slower
    while len(times) < LEAST_RUNS or (sum(times) < seconds and len(times) < MOST_RUNS):
        times.append(_once(call, inputs, donated))
    return statistics.median(times)


def _once(call: Callable, inputs: Sequence[jax.Array], donated: Sequence[int]) -> float:
    given = list(inputs)
    for position in donated:
        given[position] = jax.device_put(given[position], given[position].sharding, may_alias=False)
    jax.block_until_ready(given)
    start = time.perf_counter()
    jax.block_until_ready(call(*given))
    return time.perf_counter() - start


def _some_values(aval: Aval, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array of small numbers: equal ones would take some devices less power, and so less time."""
    dtype = jnp.dtype(aval.dtype)
    numbers = np.random.default_rng(0)
    if jnp.issubdtype(dtype, jnp.inexact):
        pattern = (0.1 * numbers.standard_normal(4093)).astype(dtype)
    else:
        pattern = numbers.integers(0, 2 if jnp.issubdtype(dtype, jnp.bool) else 128, 4093).astype(dtype)
    return jax.device_put(np.resize(pattern, aval.shape), sharding)
