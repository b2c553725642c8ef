"""Forwards alone, for evaluation and inference."""

from __future__ import annotations

import dataclasses

from mpmd.ir.plan import Cell, Task
from mpmd.schedules.base import AnyPlacement, check_num_microbatches
from mpmd.schedules.dispatch import GroupState, dispatch
from mpmd.schedules.orders import rounds_of


@dataclasses.dataclass(frozen=True)
class ForwardOnly(AnyPlacement):
    """No backwards: a free group runs a forward of the earliest round, of its first stage in the round.

    For weights that a training schedule has placed, give the placement of that schedule. With ``p`` groups,
    ``v`` stages on each, ``m`` microbatches (in the rounds of ``Interleaved1F1B``) and equal tasks:

    - step, round robin: as long as ``v m + p - 1`` tasks for ``m >= p``, ``m + v p - 1`` for fewer;
    - step, V-shaped: as long as ``2 m + 2 (p - 1)`` tasks;
    - memory: no residuals.

    Source: the forwards of GPipe, arXiv:1811.06965, section 2.
    """

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        rounds = rounds_of(num_microbatches, self.mpmd_dim)
        round_of = {microbatch: index for index, part in enumerate(rounds) for microbatch in part}

        def choose(group: GroupState) -> Task | None:
            ready = group.ready("fwd")
            return min(ready, key=lambda task: (round_of[task.microbatch], task.stage), default=None)

        return dispatch(self.placement, num_microbatches, choose, backward=None)[0]
