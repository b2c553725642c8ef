"""The workload of a schedule's lists of cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, chain

from mpmd.ir.plan import FusedTask, Task, TaskKind, TaskType
from mpmd.ir.slices import SliceNumbers
from mpmd.schedules import TaskLists
from mpmd.schedules.check import StageValue, makes, needs
from mpmd.schedules.text import slice_numbers
from mpmd.simulate.costs import Costs, types_of
from mpmd.simulate.workload import MessageTable, Workload


def schedule_workload(tasks: TaskLists, costs: Costs, slices: int) -> Workload:
    """The operations of a schedule: its tasks, or its cells if fused cells are atomic.

    As soon as an operation ends it sends its results, in one message to each group that needs them. A value
    that no task of the lists makes is available from the start. Memory counts the forwards whose residuals
    are held: from the start of the ``fwd`` to the end of its ``bwd`` or ``bwdW``, where ``bwdA`` releases the
    fraction ``1 - costs.held_for_bwdw``. The forwards of a stage without backwards hold nothing. The forward
    of a stage on one slice counts as one.

    Raises: ``TypeError`` for an entry that is not a cell, ``ValueError`` for a kind of task without a time.
    """
    _check_cells(tasks)
    rows: TaskLists = (
        tasks if costs.atomic else [[t for cell in cells for t in cell.tasks] for cells in tasks]
    )
    cells = list(chain.from_iterable(rows))
    members = [task for cell in cells for task in cell.tasks]
    operations = [operation for operation, cell in enumerate(cells) for _ in cell.tasks]
    numbers = slice_numbers(tasks, slices)
    types = _types(members, costs, numbers)
    templates = [types[task.kind, task.stage] for task in members]
    durations, at_start = [0.0] * len(cells), [0.0] * len(cells)
    at_end: list[tuple[float, ...]] = [()] * len(cells)
    for operation, template, time in zip(operations, templates, _times(tasks, templates, costs), strict=True):
        durations[operation] += time
        at_start[operation] += template.at_start
        at_end[operation] += template.at_end
    return Workload(
        costs=costs,
        bounds=list(accumulate(map(len, rows), initial=0)),
        tasks=cells,
        durations=durations,
        at_start=at_start,
        at_end=at_end,
        resident=[0.0] * len(rows),
        messages=_messages(rows, members, templates, operations, costs),
        numbers=numbers,
    )


def _check_cells(tasks: TaskLists) -> None:
    for mpmd_idx, cells in enumerate(tasks):
        if set(map(type, cells)) - {Task, FusedTask}:
            other = next(cell for cell in cells if type(cell) not in (Task, FusedTask))
            what = "neither a Task nor a FusedTask; leave idle cells out"
            raise TypeError(f"group {mpmd_idx} has {other!r}: {what}")


@dataclasses.dataclass(frozen=True)
class _TaskTemplate:
    """The properties that the tasks of a type share.

    ``makes`` and ``needs`` number values for microbatch 0; microbatch ``m`` adds ``m`` to each number.
    """

    duration: float
    makes: int | None
    needs: tuple[int, ...]
    at_start: float
    at_end: tuple[float, ...]


def _types(
    members: Sequence[Task], costs: Costs, numbers: SliceNumbers
) -> dict[tuple[TaskKind, int], _TaskTemplate]:
    present = {TaskType(*key) for key in {(task.kind, task.stage) for task in members}}
    times = costs.times(present)
    num_microbatches = 1 + max((task.microbatch for task in members), default=0)
    with_backward = {stage for kind, stage in present if kind != "fwd"}
    released = {"bwd": 1.0, "bwdA": 1.0 - costs.held_for_bwdw, "bwdW": costs.held_for_bwdw}

    def number(value: StageValue) -> int:
        what, stage, _ = value
        return (2 * stage + (what == "gradient")) * num_microbatches

    types: dict[tuple[TaskKind, int], _TaskTemplate] = {}
    for task_type in present:
        kind, stage = task_type
        task = Task(kind, stage, 0)
        result = makes(task)
        types[task_type] = _TaskTemplate(
            duration=times[task_type],
            makes=None if result is None else number(result),
            needs=tuple(map(number, needs(task, numbers))),
            at_start=1.0 if kind == "fwd" and stage in with_backward else 0.0,
            at_end=(-released[kind],) if released.get(kind) else (),
        )
    return types


def _times(tasks: TaskLists, templates: Sequence[_TaskTemplate], costs: Costs) -> list[float]:
    alone = [template.duration for template in templates]
    if not costs.fused:
        return alone
    times: list[float] = []
    for cells in tasks:
        for cell in cells:
            times += costs.share(types_of(cell), alone[len(times) : len(times) + len(cell.tasks)])
    return times


def _messages(
    rows: TaskLists,
    members: Sequence[Task],
    templates: Sequence[_TaskTemplate],
    operations: Sequence[int],
    costs: Costs,
) -> MessageTable:
    """The messages between operations, by sender and reader; task ``members[i]`` is in ``operations[i]``."""
    groups = [mpmd_idx for mpmd_idx, row in enumerate(rows) for _ in row]
    makers: dict[int, int] = {}
    for member, (task, template) in enumerate(zip(members, templates, strict=True)):
        if template.makes is not None:
            makers.setdefault(template.makes + task.microbatch, member)
    # A pair of operations is one number: a million tuples would take longer.
    pairs = []
    for member, (task, template) in enumerate(zip(members, templates, strict=True)):
        for value in template.needs:
            maker = makers.get(value + task.microbatch, member)
            sender, reader = operations[maker], operations[member]
            # A value that the same group makes later is awaited too, so that the deadlock is found.
            if groups[sender] != groups[reader] or maker > member:
                pairs.append(sender * len(groups) + reader)
    pairs.sort()
    messages = MessageTable()
    last = None
    for pair in pairs:
        sender, reader = divmod(pair, len(groups))
        edge = groups[sender], groups[reader]
        if (sender, edge) == last:
            messages.nbytes[-1] += costs.message_bytes
        else:
            messages.add(edge, costs.message_bytes, sender, reader)
            last = sender, edge
    return messages
