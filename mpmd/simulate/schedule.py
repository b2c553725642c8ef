"""The workload of a schedule's lists of cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, chain

from mpmd.ir import Cell, FusedTask, Task
from mpmd.schedules.check import Value, makes, needs
from mpmd.simulate.costs import Costs, TaskType, types_of
from mpmd.simulate.workload import Messages, Workload

Lists = Sequence[Sequence[Cell]]
"""For each group what it runs, first to last."""


def of_schedule(tasks: Lists, costs: Costs) -> Workload:
    """The operations of a schedule: its tasks, or its cells if fused cells are atomic.

    What a task makes and another group needs is sent as soon as it is made, all that one operation makes
    for a group as one message. What no task of the lists makes is there from the start. Memory counts the
    forwards whose residuals are held: from the start of the ``fwd`` to the end of its ``bwd`` or ``bwdW``,
    or in part of its ``bwdA``. A forward of a stage without backwards holds none.

    Raises: ``TypeError`` for what is not a cell, ``ValueError`` for a kind of task without a time.
    """
    _check_cells(tasks)
    rows: Lists = tasks if costs.atomic else [[t for cell in cells for t in cell.tasks] for cells in tasks]
    labels = list(chain.from_iterable(rows))
    members = [task for cell in labels for task in cell.tasks]
    operations = [operation for operation, cell in enumerate(labels) for _ in cell.tasks]
    types = _types(members, costs)
    known = [types[task.kind, task.stage] for task in members]
    durations, at_start = [0.0] * len(labels), [0.0] * len(labels)
    at_end: list[tuple[float, ...]] = [()] * len(labels)
    for operation, kind, time in zip(operations, known, _times(tasks, known, costs), strict=True):
        durations[operation] += time
        at_start[operation] += kind.at_start
        at_end[operation] += kind.at_end
    return Workload(
        costs,
        list(accumulate(map(len, rows), initial=0)),
        labels,
        durations,
        at_start,
        at_end,
        [0.0] * len(rows),
        _messages(rows, members, known, operations, costs),
    )


def _check_cells(tasks: Lists) -> None:
    for mpmd_idx, cells in enumerate(tasks):
        if set(map(type, cells)) - {Task, FusedTask}:
            other = next(cell for cell in cells if type(cell) not in (Task, FusedTask))
            what = "neither a Task nor a FusedTask; leave idle cells out"
            raise TypeError(f"group {mpmd_idx} has {other!r}: {what}")


@dataclasses.dataclass(frozen=True)
class _Type:
    """What all microbatches of a kind of task of a stage have in common.

    Values are numbers: those that ``makes`` and ``needs`` give for microbatch 0, plus the microbatch.
    """

    duration: float
    makes: int | None
    needs: tuple[int, ...]
    at_start: float
    at_end: tuple[float, ...]


def _types(members: Sequence[Task], costs: Costs) -> dict[TaskType, _Type]:
    present = {(task.kind, task.stage) for task in members}
    times = costs.times(present)
    num_stages = 1 + max((task.stage for task in members), default=0)
    num_microbatches = 1 + max((task.microbatch for task in members), default=0)
    with_backward = {stage for kind, stage in present if kind != "fwd"}
    released = {"bwd": 1.0, "bwdA": 1.0 - costs.held_for_bwdw, "bwdW": costs.held_for_bwdw}

    def number(value: Value) -> int:
        what, stage, _ = value
        return (2 * stage + (what == "gradient")) * num_microbatches

    types = {}
    for kind, stage in present:
        task = Task(kind, stage, 0)
        made = makes(task)
        types[kind, stage] = _Type(
            times[kind, stage],
            None if made is None else number(made),
            tuple(map(number, needs(task, num_stages))),
            1.0 if kind == "fwd" and stage in with_backward else 0.0,
            (-released[kind],) if released.get(kind) else (),
        )
    return types


def _times(tasks: Lists, known: Sequence[_Type], costs: Costs) -> list[float]:
    """How long each task takes where it is; a fused cell's tasks may share its time."""
    alone = [kind.duration for kind in known]
    if not costs.fused:
        return alone
    times: list[float] = []
    for cells in tasks:
        for cell in cells:
            times += costs.share(types_of(cell), alone[len(times) : len(times) + len(cell.tasks)])
    return times


def _messages(
    rows: Lists, members: Sequence[Task], known: Sequence[_Type], operations: Sequence[int], costs: Costs
) -> Messages:
    """What the tasks send one another, each of which is part of an operation, by sender and receiver."""
    groups = [mpmd_idx for mpmd_idx, row in enumerate(rows) for _ in row]
    makers: dict[int, int] = {}
    for member, (task, kind) in enumerate(zip(members, known, strict=True)):
        if kind.makes is not None:
            makers.setdefault(kind.makes + task.microbatch, member)
    # Pairs of operations, each as one number: a million tuples would take longer.
    pairs = []
    for member, (task, kind) in enumerate(zip(members, known, strict=True)):
        for value in kind.needs:
            maker = makers.get(value + task.microbatch, member)
            sender, reader = operations[maker], operations[member]
            # What is made later on the same group is awaited too, so that it is found to be stuck.
            if groups[sender] != groups[reader] or maker > member:
                pairs.append(sender * len(groups) + reader)
    pairs.sort()
    messages = Messages()
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
