"""The operations of tasks: costs of a step that has not run, and the finding about a group with too many."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from jax.extend.core import Jaxpr

from mpmd.attribution.ideal import equal_durations
from mpmd.attribution.texts import less_text
from mpmd.compiler.jaxprs.work import total_operations
from mpmd.ir.events import Event
from mpmd.ir.plan import AnyTask, Cell, OutsideTask, Plan
from mpmd.simulate import Costs
from mpmd.simulate.plan import plan_workload
from mpmd.simulate.workload import run
from mpmd.util.tables import numbers_text
from mpmd.validation import number_fault, raise_faults

Jaxprs = Mapping[tuple[int, AnyTask], Jaxpr]
"""The equations of every run of a plan, by its group and task."""

Work = Mapping[tuple[int, AnyTask], float]
"""For each run of a plan, the operations on each device of its group."""

_MOST_TASKS = 20_000
"""The tasks of a step up to which it is simulated with equal stages: more would take seconds."""

_REMEDY = (
    "Stages end where mark_stage_end is called, and all that comes after the last call is in the last stage, "
    "a second model without marks too: move the marks, or give it as many of its own; where mpmd.plan or "
    "auto_marks has chosen the ends of stages, write marks in place of that"
)


def task_work(plan: Plan, jaxprs: Jaxprs) -> Work:
    """Counts the operations of all runs; equal tasks share their equations, which are counted once."""
    counted: dict[int, int] = {}
    work = {}
    for (group, task), jaxpr in jaxprs.items():
        if id(jaxpr) not in counted:
            counted[id(jaxpr)] = total_operations(jaxpr.eqns)
        work[group, task] = counted[id(jaxpr)] / math.prod(plan.submesh(group).values())
    return work


def operation_costs(plan: Plan, jaxprs: Jaxprs, operations_per_second: float) -> Costs:
    """Costs in seconds, for a step that has not run: a task takes the time of its operations.

    They show how evenly stages share the work. They leave out memory and messages, so a step is slower, and
    small tasks more so.

    Args:
      operations_per_second: the speed of a device; all have the same.

    Raises: ``ValueError`` for a speed that is not positive.
    """
    raise_faults(number_fault("operations_per_second", operations_per_second, above=0))
    work = task_work(plan, jaxprs)
    return _costs({run: operations / operations_per_second for run, operations in work.items()})


def _costs(seconds: Work) -> Costs:
    return Costs.measured(Event(group, task, 0, time) for (group, task), time in seconds.items())


def loop_work(plan: Plan, work: Work) -> list[float]:
    by_group = [0.0] * len(plan.programs)
    for (group, task), operations in work.items():
        if not isinstance(task, OutsideTask):
            by_group[group] += operations
    return by_group


def uneven_work(plan: Plan, work: Work) -> Iterator[str]:
    """The finding about a group with twice its share of a loop's operations, or three quarters of all."""
    cells = [
        [run.task for run in program.runs if not isinstance(run.task, OutsideTask)]
        for program in plan.programs
    ]
    loads = {group: load for group, load in enumerate(loop_work(plan, work)) if cells[group]}
    total = sum(loads.values())
    for group, load in loads.items() if total and len(loads) > 1 else ():
        share, even_share = load / total, 1 / len(loads)
        if share > min(2 * even_share, 0.75):
            stages = sorted({plan.on_first_slice(task.stage) for cell in cells[group] for task in cell.tasks})
            where = f"{'stage' if len(stages) == 1 else 'stages'} {numbers_text(stages)}"
            saving = ""
            if sum(len(program.runs) for program in plan.programs) <= _MOST_TASKS:
                less = less_text(_saved_by_equal_stages(plan, _costs(work)))
                saving = f": with equal stages the step would take {less}, by a simulation of the operations"
            yield (
                f"group {group} ({where}) has {share:.0%} of the operations of the loop, of which "
                f"{even_share:.0%} would be even; the other groups wait for it{saving}. {_REMEDY}"
            )


def _saved_by_equal_stages(plan: Plan, costs: Costs) -> float:
    """Simulates by which share a step would be shorter if all stages of a loop were equal."""
    workload = plan_workload(plan, costs)
    equal = [
        time if isinstance(task, Cell) else own
        for task, time, own in zip(
            workload.tasks, equal_durations(workload, plan.loops), workload.durations, strict=True
        )
    ]
    (before,), (after,) = run(workload, 1), run(dataclasses.replace(workload, durations=equal), 1)
    return 1 - after.makespan / (before.makespan or 1)
