"""Cuts the bodies of loops into the work of stages, in phases."""

from __future__ import annotations

import dataclasses

from mpmd.compiler.graph import StageWork, TaskGraph
from mpmd.compiler.split.accumulate import Accumulation, accumulate
from mpmd.compiler.split.assign import assign
from mpmd.compiler.split.check_schedule_fits import check_schedule_fits, checked_tasks
from mpmd.compiler.split.duplicates import copy_duplicates, find_duplicates
from mpmd.compiler.split.handed_on import check_slices, handed_on
from mpmd.compiler.split.keep_carry import check_carry, keep_carry
from mpmd.compiler.split.microbatch_order import MicrobatchOrder
from mpmd.compiler.split.minimize_residuals import minimize_residuals
from mpmd.compiler.split.remove_marks import remove_marks
from mpmd.compiler.split.split_backwards import split_backwards
from mpmd.compiler.steps import CutStep, Loop
from mpmd.ir.plan import Cell


def split(step: CutStep) -> TaskGraph:
    """Splits a step into tasks.

    Raises: ``CompileError`` when a schedule gives lists of tasks that cannot run or do not fit its loop.
    """
    loops = [_split_loop(loop) for loop in step.loops]
    outer = [*step.outside[0]]
    for (accumulation, _, _), eqns in zip(loops, step.outside[1:], strict=True):
        outer += (*accumulation.before, *accumulation.after, *eqns)
    return TaskGraph(
        step=step,
        outer=tuple(outer),
        stage_work=tuple(member for _, stage_work, _ in loops for member in stage_work),
        accumulators=tuple(a for accumulation, _, _ in loops for a in accumulation.accumulators),
        tasks=tuple(tasks for _, _, tasks in loops),
    )


def _split_loop(
    loop: Loop,
) -> tuple[Accumulation, tuple[StageWork, ...], tuple[tuple[Cell, ...], ...]]:
    tasks = checked_tasks(loop)
    order = MicrobatchOrder(loop.numbers)
    # 1. The marks go; what they said about the equations around them stays.
    body = remove_marks(loop, order)
    # 2. Cheap equations are duplicated: each work that reads one computes it itself.
    duplicates = find_duplicates(body, loop.index)
    # 3. Every other equation belongs to one work.
    assigned = assign(body, duplicates, order)
    if not assigned and order.num_stages > 1:
        # No stage has work. That is right for a loop without weights, and wrong where all are scalars.
        duplicates = find_duplicates(body, loop.index, has_scalar_weights=True)
        assigned = assign(body, duplicates, order)
    # 4. The loop's results become accumulators of the work that contributes to them.
    accumulation = accumulate(loop, body, assigned, order)
    # 5. Each work gets the duplicates that it reads.
    complete = copy_duplicates(accumulation.eqns, body, duplicates, order)
    # 6. Backwards compute again what forwards need not keep for them.
    minimized, recomputed = minimize_residuals(
        complete, accumulation.updated, accumulation.states, duplicates, handed_on(complete, order)
    )
    # 7. What is carried from microbatch to microbatch is read by the work that updates it.
    kept = keep_carry(minimized, accumulation.accumulators, order)
    # 8. Backwards become two halves where the schedule has tasks for them.
    stage_work = split_backwards(kept, tasks, duplicates.keys() | recomputed)
    # An accumulator belongs to the half of a backward that updates it.
    updating = {
        (m.work.stage, var): m.work for m in reversed(stage_work) for eqn in m.eqns for var in eqn.outvars
    }
    accumulators = tuple(
        dataclasses.replace(accumulator, work=updating[accumulator.work.stage, accumulator.updated])
        for accumulator in accumulation.accumulators
    )
    check_slices(stage_work, order)
    check_carry(loop.schedule, stage_work, accumulators)
    # 9. The schedule has a task for all work, in an order that gives the loop's results.
    check_schedule_fits(loop, tasks, stage_work, accumulators)
    return dataclasses.replace(accumulation, accumulators=accumulators), stage_work, tasks
