"""Checks lists of tasks: every task once, each stage on one group, and an order that cannot deadlock."""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from mpmd.ir.plan import Cell, Task, TaskKind
from mpmd.ir.slices import SliceNumbers
from mpmd.schedules.base import TaskLists, check_task_lists
from mpmd.schedules.faults import CellPosition, Fault, ScheduleError
from mpmd.util.tables import first_few
from mpmd.validation import int_fault, raise_faults, size_fault

StageValue = tuple[Literal["activation", "gradient"], int, int]
"""A value from one task to another: a stage's output or the gradient of its input, for a microbatch."""


def makes(task: Task) -> StageValue | None:
    """The value that other tasks wait for; ``None`` for a ``bwdW``, which only adds to an accumulator."""
    if task.kind == "bwdW":
        return None
    return "activation" if task.kind == "fwd" else "gradient", task.stage, task.microbatch


def needs(task: Task, numbers: SliceNumbers) -> list[StageValue]:
    """The values that the task waits for.

    A forward needs the activation of the stage before, and the activation of its own stage on the slice
    before. A ``bwd`` or ``bwdA`` needs the forward of its own stage, which makes the residuals, and the
    gradients from the stage after and from the slice after. A ``bwdW`` needs its ``bwdA``.
    """
    stage, microbatch = task.stage, task.microbatch
    if task.kind == "fwd":
        return [("activation", before, microbatch) for before in numbers.before(stage)]
    if task.kind == "bwdW":
        return [("gradient", stage, microbatch)]
    gradients: list[StageValue] = [("gradient", after, microbatch) for after in numbers.after(stage)]
    return [("activation", stage, microbatch), *gradients]


def check_schedule(
    tasks: TaskLists,
    num_stages: int,
    num_microbatches: int,
    mpmd_dim: int | None = None,
    slices: int = 1,
) -> None:
    """Checks that the lists run every task of the step once, each stage on one group, and cannot deadlock.

    A ``FusedTask`` starts when all inputs of its members from other cells are ready; its results are ready
    when it has ended. A backward is either one ``bwd``, or a ``bwdA`` and a ``bwdW``. A step without
    backwards, as in inference, has lists of forwards alone, with every forward once.

    Args:
      tasks: the cells of each group, first to last.
      mpmd_dim: the number of groups that there should be; ``None`` allows any.
      slices: the number of slices of each microbatch; stage ``s`` on slice ``k`` is numbered
        ``k * num_stages + s``.

    Raises: ``ScheduleError``, a ``ValueError``, with all faults, and with the lists in which they are marked.
    """
    check_task_lists("tasks", tasks)
    raise_faults(
        size_fault("num_stages", num_stages, 10**15),
        int_fault("num_microbatches", num_microbatches),
        int_fault("mpmd_dim", mpmd_dim, optional=True),
        size_fault("slices", slices),
    )
    numbers = SliceNumbers(num_stages, slices)
    placed: list[_ScheduledTask] = []
    foreign: list[_ScheduledTask] = []
    for entry in _scheduled(tasks):
        (placed if _is_of_step(entry.task, numbers, num_microbatches) else foreign).append(entry)
    awaited, too_early = _dependencies(placed, numbers)
    faults: list[Fault] = []
    if mpmd_dim not in (None, len(tasks)):
        faults.append(Fault(f"lists for {len(tasks)} groups, where mpmd_dim is {mpmd_dim}"))
    faults += [
        *_not_cells(tasks),
        *([_fault("not of this step", foreign, numbers)] if foreign else []),
        *_missing(placed, numbers, num_microbatches),
        *_repeated(placed, numbers),
        *_stages_on_several_groups(placed, numbers),
        *too_early,
        *_deadlocks(tasks, awaited, _run_order(tasks, awaited), numbers),
    ]
    if faults:
        sizes = [counted(num_stages, "stage"), *([counted(slices, "slice")] if slices > 1 else [])]
        size = ", ".join([*sizes, counted(num_microbatches, "microbatch")])
        raise ScheduleError(f"the schedule cannot run ({size}):", faults, tasks, numbers)


def total_order(tasks: TaskLists, numbers: SliceNumbers | None = None) -> list[tuple[int, Cell]]:
    """All cells with their groups, each after the cells that it needs and those before it on its group.

    The groups take turns; each runs its next cell if it can. Raises ``ScheduleError`` when they deadlock.

    Args:
      numbers: the numbers of the stages on slices; ``None``: there is one slice.
    """
    placed = _scheduled(tasks)
    numbers = numbers or SliceNumbers(1 + max((entry.task.stage for entry in placed), default=0))
    awaited, too_early = _dependencies(placed, numbers)
    order = _run_order(tasks, awaited)
    if faults := [*too_early, *_deadlocks(tasks, awaited, order, numbers)]:
        raise ScheduleError("the groups get stuck:", faults, tasks, numbers)
    return [(mpmd_idx, tasks[mpmd_idx][index]) for mpmd_idx, index in order]


class _ScheduledTask(NamedTuple):
    """A task and its position: number ``member`` of the cell at position ``at`` of a group's list."""

    mpmd_idx: int
    at: int
    member: int
    task: Task

    @property
    def cell(self) -> CellPosition:
        return self.mpmd_idx, self.at


Dependencies = Mapping[CellPosition, Sequence[_ScheduledTask]]
"""For each cell that waits for tasks of other groups, those tasks."""


def _scheduled(tasks: TaskLists) -> list[_ScheduledTask]:
    return [
        _ScheduledTask(mpmd_idx, index, member, task)
        for mpmd_idx, cells in enumerate(tasks)
        for index, cell in enumerate(cells)
        if isinstance(cell, Cell)
        for member, task in enumerate(cell.tasks)
    ]


def _is_of_step(task: Task, numbers: SliceNumbers, num_microbatches: int) -> bool:
    kinds = get_args(TaskKind)
    return task.kind in kinds and task.stage in numbers.all and 0 <= task.microbatch < num_microbatches


def _not_cells(tasks: TaskLists) -> Iterator[Fault]:
    for mpmd_idx, cells in enumerate(tasks):
        for index, cell in enumerate(cells):
            if not isinstance(cell, Cell):
                what = f"{cell!r} at position {index}: neither a Task nor a FusedTask; leave idle cells out"
            elif not cell.tasks:
                what = f"an empty FusedTask at position {index}"
            else:
                continue
            yield Fault(f"group {mpmd_idx} has {what}", ((mpmd_idx, index),))


def _missing(
    placed: Sequence[_ScheduledTask], numbers: SliceNumbers, num_microbatches: int
) -> Iterator[Fault]:
    present: dict[tuple[int, int], set[TaskKind]] = collections.defaultdict(set)
    for entry in placed:
        present[entry.task.stage, entry.task.microbatch].add(entry.task.kind)
    forward_only = bool(placed) and all(kinds == {"fwd"} for kinds in present.values())
    complete = [{"fwd"}] if forward_only else [{"fwd", "bwd"}, {"fwd", "bwdA", "bwdW"}]
    absent_count = len(numbers.all) * num_microbatches - len(present)
    # A wrong number in a file can make the step huge: a few examples of missing tasks suffice.
    absent = (
        pair
        for stage in numbers.all
        for microbatch in range(num_microbatches)
        if (pair := (stage, microbatch)) not in present
    )
    examples = list(itertools.islice(absent, min(absent_count, _LISTED)))
    missing: list[Task] = []
    mixed: set[tuple[int, int]] = set()
    for stage, microbatch in sorted([*present, *examples]):
        kinds = present.get((stage, microbatch), set())
        if kinds not in complete:
            all_kinds = complete[-1 if kinds & {"bwdA", "bwdW"} else 0]
            missing += [
                Task(kind, stage, microbatch) for kind in get_args(TaskKind) if kind in all_kinds - kinds
            ]
            mixed |= {(stage, microbatch)} if "bwd" in kinds - all_kinds else set()
    if missing:
        unlisted = (absent_count - len(examples)) * len(complete[0])
        texts = map(numbers.task_text, missing)
        yield Fault(f"missing: {first_few(texts, _LISTED, len(missing) + unlisted)}")
    if mixed:
        whole = [e for e in placed if e.task.kind == "bwd" and (e.task.stage, e.task.microbatch) in mixed]
        yield _fault("there next to a bwdA or bwdW of the same stage and microbatch", whole, numbers)


def _repeated(placed: Sequence[_ScheduledTask], numbers: SliceNumbers) -> Iterator[Fault]:
    counts = collections.Counter(entry.task for entry in placed)
    if len(counts) < len(placed):
        repeated = [entry for entry in placed if counts[entry.task] > 1]
        yield _fault("more than once", sorted(repeated, key=lambda entry: entry.task), numbers)


def _stages_on_several_groups(placed: Sequence[_ScheduledTask], numbers: SliceNumbers) -> Iterator[Fault]:
    stages: dict[int, dict[int, _ScheduledTask]] = collections.defaultdict(dict)
    for entry in placed:
        stages[numbers.stage_of(entry.task.stage)].setdefault(entry.mpmd_idx, entry)
    for stage, firsts in sorted(stages.items()):
        if len(firsts) > 1:
            yield _fault(f"stage {stage} is on more than one group", list(firsts.values()), numbers)


def _dependencies(
    placed: Sequence[_ScheduledTask], numbers: SliceNumbers
) -> tuple[Dependencies, list[Fault]]:
    makers: dict[StageValue, _ScheduledTask] = {}
    for entry in placed:
        if (value := makes(entry.task)) is not None:
            makers.setdefault(value, entry)
    awaited: dict[CellPosition, list[_ScheduledTask]] = collections.defaultdict(list)
    too_early: list[Fault] = []
    for entry in placed:
        for value in needs(entry.task, numbers):
            maker = makers.get(value)
            if maker is None:
                # A value without a maker is a fault of its own; waiting for it would hide the other faults.
                continue
            if maker.mpmd_idx != entry.mpmd_idx:
                awaited[entry.cell].append(maker)
            elif maker > entry:
                early, late = numbers.task_text(entry.task), numbers.task_text(maker.task)
                message = f"group {entry.mpmd_idx} runs {early} before {late}, which it needs"
                too_early.append(Fault(message, (entry.cell, maker.cell)))
    return awaited, too_early


def _run_order(tasks: TaskLists, awaited: Dependencies) -> list[CellPosition]:
    """The cells that can run, in rounds in which each group runs its next cell if it can."""
    order: list[CellPosition] = []
    ran = [0] * len(tasks)
    waiting: dict[CellPosition, list[int]] = collections.defaultdict(list)
    this_round, next_round = list(range(len(tasks))), []
    while this_round:
        group = heapq.heappop(this_round)
        cell = group, ran[group]
        lacks = _not_run(awaited.get(cell, ()), ran)
        if lacks:
            waiting[lacks[0].cell].append(group)
        elif ran[group] < len(tasks[group]):
            order.append(cell)
            ran[group] += 1
            next_round.append(group)
            for waiter in waiting.pop(cell, ()):
                # In this round, the groups after this one are still to come.
                heapq.heappush(this_round, waiter) if waiter > group else next_round.append(waiter)
        if not this_round:
            this_round, next_round = sorted(next_round), []
    return order


def _not_run(makers: Sequence[_ScheduledTask], ran: Sequence[int]) -> list[_ScheduledTask]:
    return [maker for maker in makers if ran[maker.mpmd_idx] <= maker.at]


def _deadlocks(
    tasks: TaskLists, awaited: Dependencies, order: Sequence[CellPosition], numbers: SliceNumbers
) -> Iterator[Fault]:
    """The cycles of groups that wait for one another; a stuck group is in a cycle or waits for a cycle."""
    counts = collections.Counter(mpmd_idx for mpmd_idx, _ in order)
    ran = [counts[mpmd_idx] for mpmd_idx in range(len(tasks))]
    stuck = {g: (g, ran[g]) for g, cells in enumerate(tasks) if ran[g] < len(cells)}
    lacks = {g: _not_run(awaited[cell], ran)[0] for g, cell in stuck.items()}
    for cycle in _cycles({g: lack.mpmd_idx for g, lack in lacks.items()}):
        waits = [
            f"group {g} waits at {numbers.task_text(tasks[g][ran[g]])} for {_text(lacks[g], numbers)}"
            for g in cycle
        ]
        cells = tuple(cell for g in cycle for cell in (stuck[g], lacks[g].cell))
        yield Fault(f"deadlock: {'; '.join(waits)}", cells)


def _cycles(waits_for: Mapping[int, int]) -> Iterator[list[int]]:
    """The cycles of a graph whose nodes have one successor each."""
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


def _fault(what: str, entries: Sequence[_ScheduledTask], numbers: SliceNumbers) -> Fault:
    texts = (_text(entry, numbers) for entry in entries)
    return Fault(f"{what}: {first_few(texts, _LISTED, len(entries))}", tuple(entry.cell for entry in entries))


def _text(entry: _ScheduledTask, numbers: SliceNumbers) -> str:
    return f"{numbers.task_text(entry.task)} (group {entry.mpmd_idx})"


def counted(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


_LISTED = 8
