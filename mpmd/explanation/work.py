"""The numbers of operations of tasks and groups."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from jax.extend.core import Jaxpr

from mpmd.attribution.balance import Balance
from mpmd.attribution.ideal import equal_durations
from mpmd.attribution.texts import equal_stages_text, less_text
from mpmd.compiler.jaxprs.work import total_operations
from mpmd.explanation.costs import costs_of_tasks
from mpmd.explanation.uses import numbers_text
from mpmd.ir.plan import AnyTask, Cell, OutsideTask, Plan
from mpmd.simulate import Costs
from mpmd.simulate.plan import plan_workload
from mpmd.simulate.workload import run

_MOST_TASKS = 20_000
"""The tasks of a step up to which it is simulated with equal stages: more would take seconds."""

_REMEDY = (
    "Stages end where mark_stage_end is called, and all that comes after the last call is in the last stage, "
    "a second model without marks too: move the marks, or give it as many of its own; where mpmd.plan or "
    "auto_marks has chosen the ends of stages, write marks in place of that"
)


def task_work(plan: Plan, jaxprs: Mapping[tuple[int, AnyTask], Jaxpr]) -> dict[tuple[int, AnyTask], float]:
    """For each task of a group, its operations on each of the group's devices."""
    counted: dict[int, int] = {}
    work = {}
    for (group, task), jaxpr in jaxprs.items():
        if id(jaxpr) not in counted:
            counted[id(jaxpr)] = total_operations(jaxpr.eqns)
        work[group, task] = counted[id(jaxpr)] / math.prod(plan.submesh(group).values())
    return work


def loop_work(plan: Plan, work: Mapping[tuple[int, AnyTask], float]) -> list[float]:
    """For each group, the operations of its stages in one step, of those of its tasks."""
    of_groups = [0.0] * len(plan.programs)
    for (group, task), operations in work.items():
        if not isinstance(task, OutsideTask):
            of_groups[group] += operations
    return of_groups


def uneven_work(plan: Plan, work: Mapping[tuple[int, AnyTask], float]) -> Iterator[str]:
    """The finding about a group with twice its share of the loop's operations, or three quarters of them.

    Args:
      work: as of ``task_work``.
    """
    cells = [
        [run.task for run in program.runs if not isinstance(run.task, OutsideTask)]
        for program in plan.programs
    ]
    loads = loop_work(plan, work)
    balance = Balance({group: loads[group] for group, of_group in enumerate(cells) if of_group})
    for group in balance.loads if len(balance.loads) > 1 else ():
        if (share := balance.share(group)) > min(2 * balance.even_share, 0.75):
            stages = sorted({plan.on_first_slice(task.stage) for cell in cells[group] for task in cell.tasks})
            where = f"{'stage' if len(stages) == 1 else 'stages'} {numbers_text(stages)}"
            saving = ""
            if sum(len(program.runs) for program in plan.programs) <= _MOST_TASKS:
                share = _saved_by_equal_stages(plan, costs_of_tasks(work))
                saving = f": {equal_stages_text(less_text(share))}, by a simulation of the operations"
            yield (
                f"group {group} ({where}) has {share:.0%} of the operations of the loop, of which "
                f"{balance.even_share:.0%} would be even; the other groups wait for it{saving}. "
                f"{_REMEDY}"
            )


def _saved_by_equal_stages(plan: Plan, costs: Costs) -> float:
    """The share of a simulated step by which it would be shorter if all stages of a loop were equal."""
    workload = plan_workload(plan, costs)
    equal = [
        time if isinstance(task, Cell) else own
        for task, time, own in zip(
            workload.tasks, equal_durations(workload, plan.loops), workload.durations, strict=True
        )
    ]
    (before,), (after,) = run(workload, 1), run(dataclasses.replace(workload, durations=equal), 1)
    return 1 - after.makespan / (before.makespan or 1)
