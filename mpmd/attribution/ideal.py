"""The ideal schedule of a measured step: equal stages, free messages, and nothing between tasks.

A task takes in it the mean of its kind over the stages of its loop, an outside task the mean over all groups.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from mpmd.attribution.measured import Measured
from mpmd.ir.plan import LoopStages, OutsideTask, TaskKind, TaskType
from mpmd.simulate.costs import DEFAULT_TIMES, Costs, types_of
from mpmd.simulate.workload import Instant, StepTimes, Workload, run
from mpmd.util.grouping import grouped

_Types = tuple[TaskType, ...]
_Kinds = tuple[int, tuple[TaskKind, ...]]
"""A loop and the kinds of a cell."""


def ideal_of(measured: Measured) -> StepTimes[int]:
    durations = equal_durations(measured.workload, measured.loops)
    return undisturbed(dataclasses.replace(measured.workload, durations=durations))


def undisturbed(workload: Workload) -> StepTimes[int]:
    """The times of a workload with free messages and nothing between tasks, in whole nanoseconds."""
    (times,) = run(dataclasses.replace(workload, costs=Costs()), 1)
    columns = {field.name: list(map(int, getattr(times, field.name))) for field in dataclasses.fields(times)}
    return StepTimes(**columns)


def equal_durations(workload: Workload, loops: Sequence[LoopStages]) -> list[float]:
    """The time of each operation if all stages of a loop were equal, and outside work divided evenly."""
    medians: dict[_Types, int] = {}
    outside: dict[tuple[int, OutsideTask], int] = {}
    for group in range(workload.mpmd_dim):
        for operation in workload.operations(group):
            task, median = workload.tasks[operation], int(workload.durations[operation])
            if isinstance(task, OutsideTask):
                outside[group, task] = median
            elif not isinstance(task, Instant):
                medians[types_of(task)] = median
    of_cells = _equal_cells(medians, loops)
    of_outside: dict[OutsideTask, int] = collections.defaultdict(int)
    for (_, outside_task), median in outside.items():
        of_outside[outside_task] += median
    durations: list[float] = []
    for task in workload.tasks:
        if isinstance(task, OutsideTask):
            durations.append(of_outside[task] // workload.mpmd_dim)
        else:
            durations.append(0 if isinstance(task, Instant) else of_cells[types_of(task)])
    return durations


def _equal_cells(medians: Mapping[_Types, int], loops: Sequence[LoopStages]) -> dict[_Types, int]:
    """Returns the time of each cell if all stages of its loop took equally long.

    A fused cell takes the sum of its members' means, times the mean ratio of fused cells of the same kinds to
    their members alone: a gain from fusing is no imbalance.
    """
    first = [loop.first_stage for loop in loops[1:]]

    def kinds_of(types: _Types) -> _Kinds:
        return sum(stage <= types[0].stage for stage in first), tuple(kind for kind, _ in types)

    alone = members_alone(medians)
    of_kind = grouped((kinds_of((member,)), time) for member, time in alone.items())
    means = {kind: round(statistics.fmean(times)) for kind, times in of_kind.items()}
    together: dict[_Kinds, int] = collections.defaultdict(int)
    apart: dict[_Kinds, int] = collections.defaultdict(int)
    for types, median in medians.items():
        together[kinds_of(types)] += median
        apart[kinds_of(types)] += sum(alone[member] for member in types)
    equal = {}
    for types in medians:
        kinds, whole = kinds_of(types), sum(means[kinds_of((member,))] for member in types)
        is_fused = len(types) > 1 and apart[kinds]
        equal[types] = whole * together[kinds] // apart[kinds] if is_fused else whole
    return equal


def members_alone(medians: Mapping[_Types, int]) -> dict[TaskType, int]:
    """The time of each type of task: its own, or its share of the fused cells that it runs in.

    Members share in proportion to the mean of their kinds' own times; a kind that never runs alone counts in
    proportion to ``DEFAULT_TIMES``.
    """
    alone = {types[0]: median for types, median in medians.items() if len(types) == 1}
    by_kind = grouped((kind, median) for (kind, _), median in alone.items())
    means = {kind: round(statistics.fmean(times)) for kind, times in by_kind.items()}
    defaults = sum(DEFAULT_TIMES[kind] for kind in means)
    unit = sum(means.values()) / defaults if defaults else 1.0
    shares: dict[TaskType, list[int]] = collections.defaultdict(list)
    for types, median in medians.items():
        weights = [means.get(kind) or round(DEFAULT_TIMES[kind] * unit * 1000) / 1000 for kind, _ in types]
        for member, weight in zip(types, weights, strict=True):
            shares[member].append(int(median * weight // (sum(weights) or 1)))
    return alone | {
        member: round(statistics.fmean(times)) for member, times in shares.items() if member not in alone
    }
