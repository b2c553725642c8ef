"""Checks lists of tasks: every task once, a stage on one group, and an order that cannot get stuck."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence, Set
from typing import Literal, get_args

from mpmd.ir import Cell, Task, TaskKind
from mpmd.schedules.base import check_num_microbatches

Groups = Sequence[Sequence[Cell]]
Value = tuple[Literal["activation", "gradient"], int, int]
"""What one task makes and another needs: a stage's output, or the gradient of its input, for a microbatch."""


def makes(task: Task) -> Value | None:
    """The value other tasks wait for; ``None`` for ``bwdW``, which only adds to an accumulator."""
    made: dict[TaskKind, Value | None] = {
        "fwd": ("activation", task.stage, task.microbatch),
        "bwd": ("gradient", task.stage, task.microbatch),
        "bwdA": ("gradient", task.stage, task.microbatch),
        "bwdW": None,
    }
    return made[task.kind]


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
    there when it has ended. A backward is either one ``bwd`` or a ``bwdA`` and a ``bwdW``.

    Args:
      tasks: for each group what it runs, first to last.
      num_stages: stages of the step.
      num_microbatches: microbatches of the step.
      mpmd_dim: the number of groups there should be, if that is to be checked.

    Raises: ``ValueError`` with all the faults, each with the cells concerned.
    """
    check_num_microbatches(num_microbatches)
    sizes = (get_args(TaskKind), range(num_stages), range(num_microbatches))
    universe = set(itertools.starmap(Task, itertools.product(*sizes)))
    placed = [entry for entry in _placed(tasks) if entry.task in universe]
    awaited = _awaited(placed, num_stages)
    faults = [
        *_wrong_size(tasks, mpmd_dim),
        *_not_cells(tasks),
        *_strays(tasks, universe),
        *_missing(placed, num_stages, num_microbatches),
        *_repeated(placed),
        *_scattered(placed),
        *_too_early(placed, num_stages),
        *_deadlock(tasks, awaited, _advance(tasks, awaited)),
    ]
    if faults:
        size = f"{num_stages} stages, {num_microbatches} microbatches"
        raise ValueError("\n  - ".join([f"the schedule cannot run ({size}):", *faults]))


def total_order(tasks: Groups) -> list[tuple[int, Cell]]:
    """All cells with their groups, each after what it needs and after those before it on its group.

    The groups take turns, each running its next cell if it can. Raises ``ValueError`` when they get stuck.
    """
    placed = _placed(tasks)
    num_stages = max((entry.task.stage for entry in placed), default=0) + 1
    awaited = _awaited(placed, num_stages)
    order = _advance(tasks, awaited)
    if faults := [*_too_early(placed, num_stages), *_deadlock(tasks, awaited, order)]:
        raise ValueError("\n  - ".join(["the groups get stuck:", *faults]))
    return order


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A task and where it is: ``member`` of the cell at ``index`` of a group's list."""

    task: Task
    mpmd_idx: int
    index: int
    member: int

    def __str__(self) -> str:
        return f"{self.task} (group {self.mpmd_idx})"

    def follows(self, other: _Placed) -> bool:
        """Whether this one comes later on the group that both are on."""
        return (self.index, self.member) > (other.index, other.member)


Awaited = dict[tuple[int, int], list[_Placed]]
"""For each cell, by group and index, the tasks of other groups that it waits for."""


def _placed(tasks: Groups) -> list[_Placed]:
    return [
        _Placed(task, mpmd_idx, index, member)
        for mpmd_idx, cells in enumerate(tasks)
        for index, cell in enumerate(cells)
        if isinstance(cell, Cell)
        for member, task in enumerate(cell.tasks)
    ]


def _wrong_size(tasks: Groups, mpmd_dim: int | None) -> Iterator[str]:
    if mpmd_dim not in (None, len(tasks)):
        yield f"lists for {len(tasks)} groups, where mpmd_dim is {mpmd_dim}"


def _not_cells(tasks: Groups) -> Iterator[str]:
    for mpmd_idx, cells in enumerate(tasks):
        for index, cell in enumerate(cells):
            if not isinstance(cell, Cell):
                what = "neither a Task nor a FusedTask; leave idle cells out"
                yield f"group {mpmd_idx} has {cell!r} at position {index}: {what}"
            elif not cell.tasks:
                yield f"group {mpmd_idx} has an empty FusedTask at position {index}"


def _strays(tasks: Groups, universe: Set[Task]) -> Iterator[str]:
    if strays := [entry for entry in _placed(tasks) if entry.task not in universe]:
        yield f"not of this step: {_listed(strays)}"


def _missing(placed: list[_Placed], num_stages: int, num_microbatches: int) -> Iterator[str]:
    present = {entry.task for entry in placed}
    missing: list[Task] = []
    mixed: list[Task] = []
    for stage, microbatch in itertools.product(range(num_stages), range(num_microbatches)):
        fwd, bwd, bwd_a, bwd_w = (Task(kind, stage, microbatch) for kind in get_args(TaskKind))
        split = present & {bwd_a, bwd_w}
        wanted = [fwd, bwd_a, bwd_w] if split else [fwd, bwd]
        missing += [task for task in wanted if task not in present]
        mixed += [bwd] if split and bwd in present else []
    if missing:
        yield f"missing: {_listed(missing)}"
    if mixed:
        yield f"there next to a bwdA or bwdW of the same stage and microbatch: {_listed(mixed)}"


def _repeated(placed: list[_Placed]) -> Iterator[str]:
    counts = collections.Counter(entry.task for entry in placed)
    repeated = [entry for entry in placed if counts[entry.task] > 1]
    repeated.sort(key=lambda entry: entry.task)
    if repeated:
        yield f"more than once: {_listed(repeated)}"


def _scattered(placed: list[_Placed]) -> Iterator[str]:
    stages: dict[int, dict[int, _Placed]] = collections.defaultdict(dict)
    for entry in placed:
        stages[entry.task.stage].setdefault(entry.mpmd_idx, entry)
    for stage, firsts in sorted(stages.items()):
        if len(firsts) > 1:
            yield f"stage {stage} is on more than one group: {_listed(list(firsts.values()))}"


def _makers(placed: list[_Placed]) -> dict[Value, _Placed]:
    makers: dict[Value, _Placed] = {}
    for entry in placed:
        if (value := makes(entry.task)) is not None:
            makers.setdefault(value, entry)
    return makers


def _too_early(placed: list[_Placed], num_stages: int) -> Iterator[str]:
    makers = _makers(placed)
    for entry in placed:
        for value in needs(entry.task, num_stages):
            maker = makers.get(value)
            if maker and maker.mpmd_idx == entry.mpmd_idx and maker.follows(entry):
                yield f"group {entry.mpmd_idx} runs {entry.task} before {maker.task}, which it needs"


def _awaited(placed: list[_Placed], num_stages: int) -> Awaited:
    makers = _makers(placed)
    awaited: Awaited = collections.defaultdict(list)
    for entry in placed:
        # What nobody makes is a fault of its own; waiting for it would hide the other faults.
        found = [makers[value] for value in needs(entry.task, num_stages) if value in makers]
        awaited[entry.mpmd_idx, entry.index] += [m for m in found if m.mpmd_idx != entry.mpmd_idx]
    return awaited


def _advance(tasks: Groups, awaited: Awaited) -> list[tuple[int, Cell]]:
    """The cells that the groups get to run, in an order in which they can."""
    order: list[tuple[int, Cell]] = []
    ran = [0] * len(tasks)
    progress = True
    while progress:
        progress = False
        for mpmd_idx, cells in enumerate(tasks):
            index = ran[mpmd_idx]
            ready = all(ran[maker.mpmd_idx] > maker.index for maker in awaited[mpmd_idx, index])
            if index < len(cells) and ready:
                order.append((mpmd_idx, cells[index]))
                ran[mpmd_idx] += 1
                progress = True
    return order


def _deadlock(tasks: Groups, awaited: Awaited, order: list[tuple[int, Cell]]) -> Iterator[str]:
    ran = collections.Counter(mpmd_idx for mpmd_idx, _ in order)
    waits = []
    for mpmd_idx, cells in enumerate(tasks):
        index = ran[mpmd_idx]
        if index < len(cells):
            lacks = [maker for maker in awaited[mpmd_idx, index] if ran[maker.mpmd_idx] <= maker.index]
            waits.append(f"group {mpmd_idx} waits at {cells[index]} for {_listed(lacks)}")
    if waits:
        yield f"deadlock: {'; '.join(waits)}"


def _listed(entries: Sequence[Task | _Placed], limit: int = 8) -> str:
    shown = ", ".join(map(str, entries[:limit]))
    return shown if len(entries) <= limit else f"{shown} and {len(entries) - limit} more"
