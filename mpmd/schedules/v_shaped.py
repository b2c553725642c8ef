"""V-shaped placements: the first and the last stage are on one group, and memory is used evenly."""

from __future__ import annotations

import dataclasses
import itertools

from mpmd.ir.plan import Cell, Task, TaskKind
from mpmd.schedules.base import VShaped, check_num_microbatches, v_shape
from mpmd.schedules.dispatch import dispatch, in_order
from mpmd.schedules.orders import merge, tasks_of


@dataclasses.dataclass(frozen=True)
class ZeroBubbleV(VShaped):
    """ZB-V: no group idles between its first task and its last, in the memory of 1F1B.

    Group ``i`` of ``p`` runs the stages ``i`` and ``2 p - 1 - i``. With ``m`` microbatches and equal tasks:

    - bubble, ``m >= p``: ``(p - 1) / (6 m + p - 1)`` of the step; with ``m >= 2 p - 1`` groups idle only
      before their first task and after their last;
    - step, ``m < p``: as long as ``4 p + 2 m - 1 + max(0, 2 m - p)`` tasks;
    - memory: the residuals of ``2 min(p, m)`` stages' microbatches on every group, each half as large as with
      one stage per group;
    - a latency of ``c`` per message, up to the length of a task, adds ``5 (p - 1) c`` for ``m >= 2 p - 1``.

    Raises ``ValueError`` unless ``num_stages`` is twice ``mpmd_dim``.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv:2401.10241, section 6.
    """

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        orders = [self._order(mpmd_idx, num_microbatches) for mpmd_idx in range(self.mpmd_dim)]
        return _with_weight_gradients(self, orders, num_microbatches, limit=2 * self.mpmd_dim)

    def _order(self, mpmd_idx: int, num_microbatches: int) -> list[Task]:
        """Forwards and ``bwdA`` in the order of a longer step, cut to ``num_microbatches`` microbatches."""
        p, many = self.mpmd_dim, range(num_microbatches + 2 * self.mpmd_dim)
        down, up = self.stages_of(mpmd_idx)
        fwd_down, fwd_up = tasks_of("fwd", [down], many), tasks_of("fwd", [up], many)
        bwd_down, bwd_up = tasks_of("bwdA", [down], many), tasks_of("bwdA", [up], many)
        # Forwards go down alone until the first one comes up. Then one goes down for each that comes up,
        # until the first backward starts. From then on each group alternates between both legs and both
        # directions.
        alone = 2 * (p - mpmd_idx) - 1
        forwards = [
            *fwd_down[:alone],
            *_in_turn(fwd_up[:mpmd_idx], fwd_down[alone : alone + mpmd_idx]),
            *fwd_up[mpmd_idx:p],
            *_in_turn(fwd_down[alone + mpmd_idx :], fwd_up[p:]),
        ]
        backwards = [*bwd_up[: p - mpmd_idx], *_in_turn(bwd_down, bwd_up[p - mpmd_idx :])]
        order = merge(forwards, backwards, range(2 * p, 2 * p + len(backwards)))
        return [task for cell in order for task in cell.tasks if task.microbatch < num_microbatches]


@dataclasses.dataclass(frozen=True)
class VHalf(VShaped):
    """Half the memory of 1F1B, and half its bubble.

    Group ``i`` of ``p`` runs the stages ``i`` and ``2 p - 1 - i``; every microbatch passes the groups at the
    same times, six tasks after the microbatch before. With ``m`` microbatches and equal tasks:

    - step: as long as ``6 m + 3 p - 3`` tasks for even ``p``, ``6 m + 3 p - 4`` for odd;
    - memory: the residuals of at most ``2 ((p + 2) // 2)`` stages' microbatches on every group, each half as
      large as with one stage per group;
    - a latency costs time with many microbatches, since few microbatches are in flight.

    With few microbatches, where ``ZeroBubbleV`` needs no more memory, its shorter order is used. Raises
    ``ValueError`` unless ``num_stages`` is twice ``mpmd_dim``.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, arXiv:2405.15362, section 3
    (V-Half).
    """

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        p = self.mpmd_dim
        pause = 3 if p % 2 == 0 else 0
        starts = [(2 * i, 3 * p - 2 - i, 3 * p + pause - 1 + 2 * i, 6 * p + pause - 2 - i) for i in range(p)]
        return _repeated(self, starts, num_microbatches, limit=2 * ((p + 2) // 2))


@dataclasses.dataclass(frozen=True)
class VMin(VShaped):
    """A third of the memory of 1F1B, for a bubble two thirds as long.

    Group ``i`` of ``p`` runs the stages ``i`` and ``2 p - 1 - i``; every microbatch passes the groups without
    a pause, six tasks after the microbatch before. With ``m`` microbatches and equal tasks:

    - step: as long as ``6 m + 4 p - 5`` tasks, ``6 m + 4 p - 3`` when ``p`` is a multiple of 3;
    - memory: the residuals of at most ``2 ((p + 4) // 3)`` stages' microbatches on every group, each half as
      large as with one stage per group;
    - a latency costs time with almost every microbatch.

    With few microbatches, where ``ZeroBubbleV`` needs no more memory, its shorter order is used. Raises
    ``ValueError`` unless ``num_stages`` is twice ``mpmd_dim``.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, arXiv:2405.15362, section 3
    (V-Min).
    """

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        p = self.mpmd_dim
        pause = 2 if p % 3 == 0 else 0
        starts = [(i, 2 * p - 1 - i, 2 * p + pause + i, 4 * p + pause - 1 - i) for i in range(p)]
        return _repeated(self, starts, num_microbatches, limit=2 * ((p + 4) // 3))


def _repeated(
    schedule: VShaped, starts: list[tuple[int, int, int, int]], num_microbatches: int, limit: int
) -> list[list[Cell]]:
    """Lists in which each microbatch repeats the tasks of the microbatch before, six tasks later.

    Args:
      starts: for each group, when the first microbatch starts: ``fwd`` down, ``fwd`` up, ``bwdA`` up,
        ``bwdA`` down.
    """
    check_num_microbatches(num_microbatches)
    if 2 * min(schedule.mpmd_dim, num_microbatches) <= limit:
        return ZeroBubbleV(schedule.num_stages, schedule.mpmd_dim).tasks(num_microbatches)
    orders = []
    for mpmd_idx, times in enumerate(starts):
        down, up = schedule.stages_of(mpmd_idx)
        types: list[tuple[TaskKind, int]] = [("fwd", down), ("fwd", up), ("bwdA", up), ("bwdA", down)]
        timed = [
            (time + 6 * microbatch, Task(kind, stage, microbatch))
            for time, (kind, stage) in zip(times, types, strict=True)
            for microbatch in range(num_microbatches)
        ]
        orders.append([task for _, task in sorted(timed)])
    return _with_weight_gradients(schedule, orders, num_microbatches, limit)


def _with_weight_gradients(
    schedule: VShaped, orders: list[list[Task]], num_microbatches: int, limit: int
) -> list[list[Cell]]:
    """Adds each ``bwdW`` where its group would be idle if all tasks took equally long."""
    return dispatch(v_shape(schedule.mpmd_dim), num_microbatches, in_order(orders, limit, fill=True))[0]


def _in_turn(first: list[Cell], second: list[Cell]) -> list[Cell]:
    pairs = itertools.zip_longest(first, second)
    return [cell for pair in pairs for cell in pair if cell is not None]
