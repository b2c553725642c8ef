"""Estimates of the times of tasks, from their operations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from mpmd.explanation.tasks import TaskSummary
from mpmd.ir.plan import AnyTask, Cell, FusedTask, OutsideTask, Plan, TaskType, parse_task
from mpmd.simulate import Costs
from mpmd.simulate.costs import types_of
from mpmd.validation import number_fault, raise_faults


def operation_costs(plan: Plan, tasks: Iterable[TaskSummary], operations_per_second: float) -> Costs:
    """Costs in seconds, for a step that has not run: the time of a task is that of its operations.

    They show how evenly stages share the work. They leave out what memory and messages take, so a step is
    slower, and small tasks more so.

    Args:
      operations_per_second: the speed of a device; all have the same.

    Raises: ``ValueError`` for a speed that is not positive.
    """
    raise_faults(number_fault("operations_per_second", operations_per_second, above=0))
    seconds = {
        (summary.mpmd_idx, _any_microbatch(summary.task)): summary.operations
        / math.prod(plan.submesh(summary.mpmd_idx).values())
        / operations_per_second
        for summary in tasks
    }
    return costs_of_tasks(seconds)


def costs_of_tasks(seconds: Mapping[tuple[int, AnyTask], float]) -> Costs:
    """The costs of tasks by their groups; those of one type have the largest of their times."""
    alone: dict[TaskType, float] = {}
    fused: dict[tuple[TaskType, ...], float] = {}
    outside: dict[tuple[int, OutsideTask], float] = {}
    for (mpmd_idx, task), time in seconds.items():
        if isinstance(task, OutsideTask):
            outside[mpmd_idx, task] = time
            continue
        types = types_of(task)
        if isinstance(task, FusedTask):
            fused[types] = max(time, fused.get(types, 0))
        else:
            alone[types[0]] = max(time, alone.get(types[0], 0))
    return Costs(tasks=alone, fused=fused, outside=outside)


def _any_microbatch(text: str) -> Cell | OutsideTask:
    """A task as a ``TaskSummary`` has it, with some microbatch."""
    try:
        return parse_task(text)
    except ValueError:
        members = text.removeprefix("FusedTask(").removesuffix(")").split(", ")
        cells = ", ".join(f"{member}__0" for member in members)
        return parse_task(f"FusedTask({cells})" if len(members) > 1 else cells)
