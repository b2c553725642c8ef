"""Checks that a schedule fits the loop that it is given to."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jax.extend.core import Var

from mpmd.compiler.graph import Accumulator, StageWork
from mpmd.compiler.split.microbatch_order import MicrobatchOrder
from mpmd.compiler.steps import Loop
from mpmd.errors import CompileError
from mpmd.ir.plan import Cell, FusedTask, Task, TaskType
from mpmd.schedules import Schedule, TaskLists, check_schedule


def checked_tasks(loop: Loop) -> tuple[tuple[Cell, ...], ...]:
    """The tasks of each group. Raises ``CompileError`` when the schedule gives lists that cannot run."""
    schedule, num_microbatches = loop.schedule, loop.num_microbatches
    try:
        tasks = schedule.tasks(num_microbatches)
        check_schedule(tasks, schedule.num_stages, num_microbatches, schedule.mpmd_dim, schedule.slices)
    except ValueError as error:
        raise CompileError(f"{schedule.name}.tasks({num_microbatches}): {error}") from error
    if not loop.first_stage:
        return tuple(map(tuple, tasks))
    return tuple(tuple(_of_later_loop(cell, loop.first_stage) for cell in cells) for cells in tasks)


def _of_later_loop(cell: Cell, first_stage: int) -> Cell:
    tasks = tuple(dataclasses.replace(task, stage=first_stage + task.stage) for task in cell.tasks)
    return FusedTask(tasks) if isinstance(cell, FusedTask) else tasks[0]


def check_schedule_fits(
    loop: Loop, tasks: TaskLists, stages: Sequence[StageWork], accumulators: Sequence[Accumulator]
) -> None:
    """Checks that the tasks run all the work of the loop, and in an order that gives its results.

    Raises: ``CompileError`` with all that does not fit.
    """
    members = [task for cells in tasks for cell in cells for task in cell.tasks]
    faults = [
        *_without_tasks(loop, members, stages),
        *_out_of_order(loop.schedule, members, accumulators),
        *_slices_out_of_order(loop, members, accumulators),
    ]
    if faults:
        raise CompileError(faults)


def _without_tasks(loop: Loop, members: Sequence[Task], stages: Sequence[StageWork]) -> Iterator[str]:
    has_backward = any(task.kind != "fwd" for task in members)
    if not has_backward and any(stage.work.kind != "fwd" for stage in stages):
        yield (
            f"the schedule {loop.schedule} runs forwards only, but the loop at {loop.where} takes gradients: "
            "use another one, or call the loss without jax.grad"
        )


def _out_of_order(
    schedule: Schedule, members: Sequence[Task], accumulators: Sequence[Accumulator]
) -> Iterator[str]:
    """Sums, maxima and stacks do not depend on the order of the microbatches; any other operation may."""
    for work in dict.fromkeys(accumulator.work for accumulator in accumulators if accumulator.ordered):
        kinds = {work.kind, "bwd"} if work.kind != "fwd" else {"fwd"}
        run = [task for task in members if task.kind in kinds and task.stage == work.stage]
        wrong = (pair for pair in itertools.pairwise(run) if pair[0].microbatch > pair[1].microbatch)
        for first, second in itertools.islice(wrong, 1):
            yield (
                f"the schedule {schedule} runs {first} before {second}, but a result of the loop is "
                "carried there, or accumulated by another operation than Add, Max and Concat: order matters"
            )


def _slices_out_of_order(
    loop: Loop, members: Sequence[Task], accumulators: Sequence[Accumulator]
) -> Iterator[str]:
    """A stage adds up its slices in one order, whatever the schedule: sums of floats depend on it."""
    order = MicrobatchOrder(loop.numbers)
    works: dict[Var, set[TaskType]] = collections.defaultdict(set)
    for accumulator in accumulators:
        works[accumulator.state].add(accumulator.work)
    shared = {frozenset(adding) for adding in works.values() if len(adding) > 1}
    for adding in sorted(shared, key=min):
        types = adding | {TaskType("bwd", work.stage) for work in adding if work.kind != "fwd"}
        run = [(task.microbatch, order.position(task.type), task) for task in members if task.type in types]
        for (*before, first), (*after, second) in itertools.pairwise(run):
            if before > after:
                text = loop.numbers.task_text
                yield (
                    f"the schedule {loop.schedule} runs {text(first)} before {text(second)}, but a stage "
                    "adds up its slices by microbatch, and those of a microbatch in ascending order in "
                    "forwards and in descending order in backwards, so that all schedules give equal sums"
                )
                break
