"""The pieces that schedules are put together from: runs of one kind, merged into one order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpmd.ir import Cell, FusedTask, Task, TaskKind


def tasks_of(kind: TaskKind, stages: Iterable[int], microbatches: Sequence[int]) -> list[Cell]:
    """One task per stage and microbatch; the microbatch changes fastest."""
    return [Task(kind, stage, microbatch) for stage in stages for microbatch in microbatches]


def merge(forwards: list[Cell], backwards: list[Cell], forwards_before: Iterable[int]) -> list[Cell]:
    """One order of both lists, in which ``forwards_before[i]`` forwards precede backward ``i``.

    The counts must not fall; those beyond the number of forwards mean all of them.
    """
    merged: list[Cell] = []
    done = 0
    for backward, count in zip(backwards, forwards_before, strict=True):
        merged += [*forwards[done:count], backward]
        done = count
    return merged


def alternate(forwards: list[Cell], backwards: list[Cell], warmup: int) -> list[Cell]:
    """``warmup`` forwards, then one forward and one backward in turn, then the rest of the backwards."""
    return merge(forwards, backwards, range(warmup + 1, warmup + 1 + len(backwards)))


def fuse_forward_with_backward(cells: list[Cell], stage: int) -> list[Cell]:
    """Makes one task of each forward of ``stage`` and the backward right after it.

    That is for the last stage: nothing else waits for its forward, and its residuals need not leave the
    executable.
    """
    fused: list[Cell] = []
    for cell in cells:
        previous = fused[-1] if fused else None
        if isinstance(cell, Task) and previous == Task("fwd", stage, cell.microbatch) and cell.kind == "bwd":
            fused[-1] = FusedTask((previous, cell))
        else:
            fused.append(cell)
    return fused
