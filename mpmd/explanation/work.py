"""How much work tasks and groups have, in operations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping

from jax.extend.core import Jaxpr

from mpmd.compiler.jaxprs.work import total_operations
from mpmd.errors import PerformanceWarning
from mpmd.explanation.uses import numbers_text
from mpmd.ir.plan import AnyTask, OutsideTask, Plan

_LARGE = 1e9
"""From so many operations of a loop on, their number tells what takes time."""


def loop_work(plan: Plan, jaxprs: Mapping[tuple[int, AnyTask], Jaxpr]) -> list[float]:
    """For each group, the operations of its stages in one step, on each of its devices."""
    known: dict[int, int] = {}
    work = [0.0] * len(plan.programs)
    for (group, task), jaxpr in jaxprs.items():
        if not isinstance(task, OutsideTask):
            if id(jaxpr) not in known:
                known[id(jaxpr)] = total_operations(jaxpr.eqns)
            work[group] += known[id(jaxpr)] / math.prod(plan.submesh(group).values())
    return work


def uneven_work(plan: Plan, work: list[float]) -> Iterator[str]:
    """What is to be said of a group that has twice its share of the loop's work, or three quarters of it."""
    cells = [
        [run.task for run in program.runs if not isinstance(run.task, OutsideTask)]
        for program in plan.programs
    ]
    total, num_groups = sum(work), sum(map(bool, cells))
    for group, (of_group, own) in enumerate(zip(work, cells, strict=True)):
        if num_groups > 1 and of_group > min(2 / num_groups, 0.75) * total:
            stages = sorted({task.stage for cell in own for task in cell.tasks})
            where = f"{'stage' if len(stages) == 1 else 'stages'} {numbers_text(stages)}"
            yield (
                f"group {group} ({where}) has {of_group / total:.0%} of the operations of the loop, of which "
                f"{1 / num_groups:.0%} would be even; the other groups wait for it. Stages end where "
                "mark_stage_end is called, and all that comes after the last call is in the last stage, a "
                "second model without marks too: move the marks, or give it as many of its own; where "
                "mpmd.plan or auto_marks has chosen the ends of stages, write marks in place of that"
            )


def warn_of_uneven_work(plan: Plan, jaxprs: Mapping[tuple[int, AnyTask], Jaxpr]) -> None:
    """Warns, by a ``PerformanceWarning``, when one group has most of a large loop's work."""
    work = loop_work(plan, jaxprs)
    if sum(work) >= _LARGE:
        for text in uneven_work(plan, work):
            warnings.warn(text, PerformanceWarning, stacklevel=2)
