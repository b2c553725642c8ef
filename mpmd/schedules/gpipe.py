"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

import dataclasses

from mpmd.ir import Cell
from mpmd.schedules.base import OneStagePerGroup, check_num_microbatches
from mpmd.schedules.orders import tasks_of


@dataclasses.dataclass(frozen=True)
class GPipe(OneStagePerGroup):
    """Every group runs the forwards of all ``m`` microbatches, then their backwards.

    The simplest schedule, and the one that needs the most memory. With ``p`` stages:

    - bubble: ``(p - 1) / (m + p - 1)`` of the step;
    - memory: the residuals of all ``m`` microbatches on every group.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2018, arXiv:1811.06965, section 2.
    """

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        microbatches = range(num_microbatches)
        return [
            tasks_of("fwd", [stage], microbatches) + tasks_of("bwd", [stage], microbatches)
            for stage in range(self.num_stages)
        ]
