"""Checks lists of tasks: every task once, a stage on one group, and an order that cannot get stuck."""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from mpmd.ir import Cell, Task, TaskKind
from mpmd.schedules.base import check_num_microbatches
from mpmd.schedules.faults import Fault, Position, ScheduleError

Groups = Sequence[Sequence[Cell]]
Value = tuple[Literal["activation", "gradient"], int, int]
"""What one task makes and another needs: a stage's output, or the gradient of its input, for a microbatch."""


def makes(task: Task) -> Value | None:
    """The value other tasks wait for; ``None`` for ``bwdW``, which only adds to an accumulator."""
    if task.kind == "bwdW":
        return None
    return "activation" if task.kind == "fwd" else "gradient", task.stage, task.microbatch


def needs(task: Task, num_stages: int) -> list[Value]:
    """The values the task waits for.

    A forward needs the activation of the stage before. A ``bwd`` or ``bwdA`` needs its own stage's
    forward, for the residuals, and the gradient from the stage after. A ``bwdW`` needs its ``bwdA``.
    """
    stage, microbatch = task.stage, task.microbatch
    if task.kind == "fwd":
        return [("activation", stage - 1, microbatch)] if stage > 0 else []
    if task.kind == "bwdW":
        return [("gradient", stage, microbatch)]
    from_next: list[Value] = [("gradient", stage + 1, microbatch)] if stage + 1 < num_stages else []
    return [("activation", stage, microbatch), *from_next]


def check_schedule(
    tasks: Groups, num_stages: int, num_microbatches: int, mpmd_dim: int | None = None
) -> None:
    """Checks that the lists run every task of the step once, each stage on one group, and never get stuck.

    A ``FusedTask`` starts when all that its members need from elsewhere is there, and what they make is
    there when it has ended. A backward is either one ``bwd`` or a ``bwdA`` and a ``bwdW``. Lists of forwards
    alone are for a step without backwards, as in inference, and have every forward once.

    Args:
      tasks: for each group what it runs, first to last.
      num_stages: stages of the step.
      num_microbatches: microbatches of the step.
      mpmd_dim: the number of groups there should be, if that is to be checked.

    Raises: ``ScheduleError``, a ``ValueError``, with all the faults and the lists with their cells marked.
    """
    check_num_microbatches(num_microbatches)
    placed: list[_Placed] = []
    strays: list[_Placed] = []
    for entry in _placed(tasks):
        (placed if _is_of_step(entry.task, num_stages, num_microbatches) else strays).append(entry)
    awaited, too_early = _dependencies(placed, num_stages)
    faults = [
        *_wrong_size(tasks, mpmd_dim),
        *_not_cells(tasks),
        *_strays(strays),
        *_missing(placed, num_stages, num_microbatches),
        *_repeated(placed),
        *_scattered(placed),
        *too_early,
        *_deadlocks(tasks, awaited, _advance(tasks, awaited)),
    ]
    if faults:
        size = f"{counted(num_stages, 'stage')}, {counted(num_microbatches, 'microbatch')}"
        raise ScheduleError(f"the schedule cannot run ({size}):", faults, tasks)


def total_order(tasks: Groups) -> list[tuple[int, Cell]]:
    """All cells with their groups, each after what it needs and after those before it on its group.

    The groups take turns, each running its next cell if it can. Raises ``ScheduleError`` when they get stuck.
    """
    placed = _placed(tasks)
    num_stages = max((entry.task.stage for entry in placed), default=0) + 1
    awaited, too_early = _dependencies(placed, num_stages)
    order = _advance(tasks, awaited)
    if faults := [*too_early, *_deadlocks(tasks, awaited, order)]:
        raise ScheduleError("the groups get stuck:", faults, tasks)
    return [(mpmd_idx, tasks[mpmd_idx][index]) for mpmd_idx, index in order]


class _Placed(NamedTuple):
    """A task and where it is: ``member`` of the cell ``at`` that place in a group's list."""

    mpmd_idx: int
    at: int
    member: int
    task: Task

    def __str__(self) -> str:
        return f"{self.task} (group {self.mpmd_idx})"

    @property
    def cell(self) -> Position:
        return self.mpmd_idx, self.at


Awaited = Mapping[Position, Sequence[_Placed]]
"""For each cell that waits for tasks of other groups, those tasks."""


def _placed(tasks: Groups) -> list[_Placed]:
    return [
        _Placed(mpmd_idx, index, member, task)
        for mpmd_idx, cells in enumerate(tasks)
        for index, cell in enumerate(cells)
        if isinstance(cell, Cell)
        for member, task in enumerate(cell.tasks)
    ]


def _is_of_step(task: Task, num_stages: int, num_microbatches: int) -> bool:
    kinds = get_args(TaskKind)
    return task.kind in kinds and 0 <= task.stage < num_stages and 0 <= task.microbatch < num_microbatches


def _wrong_size(tasks: Groups, mpmd_dim: int | None) -> Iterator[Fault]:
    if mpmd_dim not in (None, len(tasks)):
        yield Fault(f"lists for {len(tasks)} groups, where mpmd_dim is {mpmd_dim}")


def _not_cells(tasks: Groups) -> Iterator[Fault]:
    for mpmd_idx, cells in enumerate(tasks):
        for index, cell in enumerate(cells):
            if not isinstance(cell, Cell):
                what = f"{cell!r} at position {index}: neither a Task nor a FusedTask; leave idle cells out"
            elif not cell.tasks:
                what = f"an empty FusedTask at position {index}"
            else:
                continue
            yield Fault(f"group {mpmd_idx} has {what}", ((mpmd_idx, index),))


def _strays(strays: Sequence[_Placed]) -> Iterator[Fault]:
    if strays:
        yield _fault("not of this step", strays)


def _missing(placed: Sequence[_Placed], num_stages: int, num_microbatches: int) -> Iterator[Fault]:
    there: dict[tuple[int, int], set[TaskKind]] = collections.defaultdict(set)
    for entry in placed:
        there[entry.task.stage, entry.task.microbatch].add(entry.task.kind)
    forward_only = bool(placed) and all(kinds == {"fwd"} for kinds in there.values())
    complete = [{"fwd"}] if forward_only else [{"fwd", "bwd"}, {"fwd", "bwdA", "bwdW"}]
    absent_count = num_stages * num_microbatches - len(there)
    # A wrong number in a file can make the step huge: of what is not there at all, some examples suffice.
    absent = (
        pair
        for stage in range(num_stages)
        for microbatch in range(num_microbatches)
        if (pair := (stage, microbatch)) not in there
    )
    examples = list(itertools.islice(absent, min(absent_count, LISTED)))
    missing: list[Task] = []
    mixed: set[tuple[int, int]] = set()
    for stage, microbatch in sorted([*there, *examples]):
        kinds = there.get((stage, microbatch), set())
        if kinds not in complete:
            wanted = complete[-1 if kinds & {"bwdA", "bwdW"} else 0]
            missing += [
                Task(kind, stage, microbatch) for kind in get_args(TaskKind) if kind in wanted - kinds
            ]
            mixed |= {(stage, microbatch)} if "bwd" in kinds - wanted else set()
    if missing:
        unlisted = (absent_count - len(examples)) * len(complete[0])
        yield Fault(f"missing: {_listed(missing, unlisted)}")
    if mixed:
        whole = [e for e in placed if e.task.kind == "bwd" and (e.task.stage, e.task.microbatch) in mixed]
        yield _fault("there next to a bwdA or bwdW of the same stage and microbatch", whole)


def _repeated(placed: Sequence[_Placed]) -> Iterator[Fault]:
    counts = collections.Counter(entry.task for entry in placed)
    if len(counts) < len(placed):
        repeated = [entry for entry in placed if counts[entry.task] > 1]
        yield _fault("more than once", sorted(repeated, key=lambda entry: entry.task))


def _scattered(placed: Sequence[_Placed]) -> Iterator[Fault]:
    stages: dict[int, dict[int, _Placed]] = collections.defaultdict(dict)
    for entry in placed:
        stages[entry.task.stage].setdefault(entry.mpmd_idx, entry)
    for stage, firsts in sorted(stages.items()):
        if len(firsts) > 1:
            yield _fault(f"stage {stage} is on more than one group", list(firsts.values()))


def _dependencies(placed: Sequence[_Placed], num_stages: int) -> tuple[Awaited, list[Fault]]:
    """What each cell waits for, and the faults of order within one group."""
    makers: dict[Value, _Placed] = {}
    for entry in placed:
        if (value := makes(entry.task)) is not None:
            makers.setdefault(value, entry)
    awaited: dict[Position, list[_Placed]] = collections.defaultdict(list)
    too_early: list[Fault] = []
    for entry in placed:
        for value in needs(entry.task, num_stages):
            maker = makers.get(value)
            if maker is None:
                # That nobody makes it is a fault of its own; waiting for it would hide the other faults.
                continue
            if maker.mpmd_idx != entry.mpmd_idx:
                awaited[entry.cell].append(maker)
            elif maker > entry:
                message = f"group {entry.mpmd_idx} runs {entry.task} before {maker.task}, which it needs"
                too_early.append(Fault(message, (entry.cell, maker.cell)))
    return awaited, too_early


def _advance(tasks: Groups, awaited: Awaited) -> list[Position]:
    """The cells that the groups get to run, in rounds in which each group runs its next cell if it can."""
    order: list[Position] = []
    ran = [0] * len(tasks)
    waiting: dict[Position, list[int]] = collections.defaultdict(list)
    this_round, next_round = list(range(len(tasks))), []
    while this_round:
        group = heapq.heappop(this_round)
        cell = group, ran[group]
        lacks = _lacks(awaited.get(cell, ()), ran)
        if lacks:
            waiting[lacks[0].cell].append(group)
        elif ran[group] < len(tasks[group]):
            order.append(cell)
            ran[group] += 1
            next_round.append(group)
            for waiter in waiting.pop(cell, ()):
                # In this round it is still the turn of the groups after this one.
                heapq.heappush(this_round, waiter) if waiter > group else next_round.append(waiter)
        if not this_round:
            this_round, next_round = sorted(next_round), []
    return order


def _lacks(makers: Sequence[_Placed], ran: Sequence[int]) -> list[_Placed]:
    return [maker for maker in makers if ran[maker.mpmd_idx] <= maker.at]


def _deadlocks(tasks: Groups, awaited: Awaited, order: Sequence[Position]) -> Iterator[Fault]:
    """The circles of groups that wait for one another; other groups that are stuck wait for these."""
    counts = collections.Counter(mpmd_idx for mpmd_idx, _ in order)
    ran = [counts[mpmd_idx] for mpmd_idx in range(len(tasks))]
    stuck = {g: (g, ran[g]) for g, cells in enumerate(tasks) if ran[g] < len(cells)}
    lacks = {g: _lacks(awaited[cell], ran)[0] for g, cell in stuck.items()}
    for circle in _circles({g: lack.mpmd_idx for g, lack in lacks.items()}):
        waits = [f"group {g} waits at {tasks[g][ran[g]]} for {lacks[g]}" for g in circle]
        cells = tuple(cell for g in circle for cell in (stuck[g], lacks[g].cell))
        yield Fault(f"deadlock: {'; '.join(waits)}", cells)


def _circles(waits_for: Mapping[int, int]) -> Iterator[list[int]]:
    """The circles of a graph in which one edge leaves each node."""
    seen: set[int] = set()
    for start in waits_for:
        path: list[int] = []
        node = start
        while node not in seen:
            seen.add(node)
            path.append(node)
            node = waits_for[node]
        if node in path:
            yield path[path.index(node) :]


def _fault(what: str, entries: Sequence[_Placed]) -> Fault:
    return Fault(f"{what}: {_listed(entries)}", tuple(entry.cell for entry in entries))


def counted(count: int, noun: str) -> str:
    """A count with its noun, e.g. ``2 stages`` or ``1 microbatch``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


LISTED = 8
"""How many tasks a message lists."""


def _listed(entries: Sequence[Task | _Placed], unlisted: int = 0) -> str:
    shown = ", ".join(map(str, entries[:LISTED]))
    more = len(entries) - LISTED + unlisted
    return shown if more <= 0 else f"{shown} and {more} more"
