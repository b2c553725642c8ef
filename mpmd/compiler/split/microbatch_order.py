"""The order in which one microbatch passes through the work of the stages."""

from __future__ import annotations

import dataclasses

from mpmd.ir.plan import TaskType


@dataclasses.dataclass(frozen=True)
class MicrobatchOrder:
    """Numbers work in the order in which one microbatch passes through it: forwards up, then backwards down.

    The positions are 0 to S-1 for the forwards of the S stages of a loop, from its first stage on, and S to
    2S-1 for the backwards, from its last stage on. Both halves of a backward have its position. A value may
    only be read by the work that makes it and by later work, whatever the schedule.
    """

    stages: range

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def position(self, work: TaskType) -> int:
        nth = work.stage - self.stages.start
        return nth if work.kind == "fwd" else self.mirrored(nth)

    def work(self, position: int) -> TaskType:
        if position < self.num_stages:
            return TaskType("fwd", self.stages[position])
        return TaskType("bwd", self.stages[self.mirrored(position)])

    def is_backward(self, position: int) -> bool:
        return position >= self.num_stages

    def mirrored(self, position: int) -> int:
        """The position of the same stage's other direction."""
        return 2 * self.num_stages - 1 - position
