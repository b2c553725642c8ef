"""The parts of schedules: sequences of tasks of one kind, merged into one order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from mpmd.ir.plan import Cell, FusedTask, Task, TaskKind
from mpmd.ir.slices import SliceNumbers


def tasks_of(kind: TaskKind, stages: Iterable[int], microbatches: Sequence[int]) -> list[Cell]:
    return [Task(kind, stage, microbatch) for stage in stages for microbatch in microbatches]


def on_slices(lists: Sequence[Sequence[Cell]], numbers: SliceNumbers) -> list[list[Cell]]:
    """Lists of the tasks of slices.

    Groups take slices in a fixed order: by microbatch, and within a microbatch forwards in ascending order of
    slices, backwards in descending order.

    Args:
      lists: the tasks of each group for stages from 0 to ``num_stages - 1``. In the place of its microbatch,
        a task has the position of its slice in that order.
    """
    if numbers.slices == 1:
        return [list(cells) for cells in lists]
    return [[_cell_on_slices(cell, numbers) for cell in cells] for cells in lists]


def _cell_on_slices(cell: Cell, numbers: SliceNumbers) -> Cell:
    tasks = tuple(on_slice(task, numbers) for task in cell.tasks)
    return FusedTask(tasks) if isinstance(cell, FusedTask) else tasks[0]


def on_slice(task: Task, numbers: SliceNumbers) -> Task:
    """The task of a slice that is given by its position, as in ``on_slices``."""
    if numbers.slices == 1:
        return task
    microbatch, nth = divmod(task.microbatch, numbers.slices)
    slice_index = nth if task.kind == "fwd" else numbers.slices - 1 - nth
    return Task(task.kind, numbers.number(task.stage, slice_index), microbatch)


def by_position(lists: Sequence[Sequence[Cell]], numbers: SliceNumbers) -> list[list[Task]]:
    """Lists of the tasks of slices as ``on_slices`` takes them, without fused tasks."""
    return [[_by_position(task, numbers) for cell in cells for task in cell.tasks] for cells in lists]


def _by_position(task: Task, numbers: SliceNumbers) -> Task:
    slice_index = numbers.slice_of(task.stage)
    nth = slice_index if task.kind == "fwd" else numbers.slices - 1 - slice_index
    return Task(task.kind, numbers.stage_of(task.stage), task.microbatch * numbers.slices + nth)


def in_rounds(kind: TaskKind, stages: Sequence[int], rounds: Iterable[Sequence[int]]) -> list[Cell]:
    return [task for part in rounds for task in tasks_of(kind, stages, part)]


def merge(
    forwards: list[Cell], backwards: list[Cell], forwards_before: Iterable[int], fused: bool = False
) -> list[Cell]:
    """Merges both lists into an order in which ``forwards_before[i]`` forwards precede backward ``i``.

    The counts must not descend; a count beyond the number of forwards means all forwards. If ``fused``, a
    backward and the forward right before it are one task, as long as there are forwards.
    """
    merged: list[Cell] = []
    done = 0
    for backward, count in zip(backwards, forwards_before, strict=True):
        new = forwards[done:count]
        if fused and new and count <= len(forwards):
            merged += [*new[:-1], FusedTask((*new[-1].tasks, *backward.tasks))]
        else:
            merged += [*new, backward]
        done = count
    return merged


def in_turn(
    stages: Sequence[int], rounds: list[range], ahead: int, *, delay: int | None = None, fused: bool = False
) -> list[Cell]:
    """The tasks of a group that runs its first backward when it can, and then a forward before each backward.

    Args:
      stages: the stages of the group, in the order in which forwards pass them.
      rounds: the microbatches, as of ``rounds_of``; one round for a group with one stage.
      ahead: the number of forwards by which the group is ahead of a last group that waits for no message.
      delay: the number of ``bwdA`` between a ``bwdA`` and its ``bwdW``; ``None``: backwards are whole.
      fused: as of ``merge``.
    """
    forwards = in_rounds("fwd", stages, rounds)
    backwards = in_rounds("bwd" if delay is None else "bwdA", stages[::-1], rounds)
    counts = (count + ahead for count in forwards_before_backwards(rounds, len(stages)))
    order = merge(forwards, backwards, counts, fused)
    return order if delay is None else with_weight_gradients(order, delay)


def rounds_of(num_microbatches: int, mpmd_dim: int) -> list[range]:
    """Rounds of ``mpmd_dim`` or more microbatches, as equal as possible, the longer ones first."""
    # A round shorter than the number of groups would leave the first group waiting for the last one.
    count = max(1, num_microbatches // mpmd_dim)
    size, longer = divmod(num_microbatches, count)
    sizes = [size + 1] * longer + [size] * (count - longer)
    bounds = itertools.accumulate(sizes, initial=0)
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def forwards_before_backwards(rounds: list[range], stages_per_group: int) -> Iterator[int]:
    """The number of forwards that precede each backward on the last group.

    A round's first backward needs the round's forwards on all stages of the group but the last. From then on
    each backward follows a forward, on the last stage its own, until the forwards that the next round needs
    have run. A round that is longer than the next one has backwards left at that point; they run alone.
    """
    firsts = [stages_per_group * part.start + (stages_per_group - 1) * len(part) for part in rounds]
    ends = [*firsts[1:], stages_per_group * rounds[-1].stop]
    for part, first, end in zip(rounds, firsts, ends, strict=True):
        for index in range(stages_per_group * len(part)):
            yield min(first + index + 1, end)


def fuse_forward_with_backward(cells: list[Cell], stage: int) -> list[Cell]:
    """Fuses each forward of ``stage`` with the backward right after it, if there is one.

    ``stage`` is the last one: only its own backward waits for its forward, so that the forward may wait for
    what the backward needs.
    """
    fused: list[Cell] = []
    for cell in cells:
        previous = fused[-1] if fused else None
        if (
            isinstance(previous, Task)
            and isinstance(cell, Task)
            and (previous.kind, previous.stage, cell.kind) == ("fwd", stage, "bwd")
        ):
            fused[-1] = FusedTask((previous, cell))
        else:
            fused.append(cell)
    return fused


def with_weight_gradients(cells: list[Cell], delay: int) -> list[Cell]:
    """Adds each ``bwdW`` after the ``bwdA`` that comes ``delay`` later than its own, or at the end."""
    waiting: list[Cell] = []
    merged: list[Cell] = []
    for cell in cells:
        merged.append(cell)
        if isinstance(cell, Task) and cell.kind == "bwdA":
            waiting.append(Task("bwdW", cell.stage, cell.microbatch))
        if len(waiting) > delay:
            merged.append(waiting.pop(0))
    return merged + waiting
