"""The order in which one microbatch passes through the work of the stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mpmd.ir.plan import TaskType
from mpmd.ir.slices import SliceNumbers


@dataclasses.dataclass(frozen=True)
class MicrobatchOrder:
    """Numbers work in the order in which one microbatch passes through it: forwards up, then backwards down.

    The positions are 0 to N-1 for the forwards of the N stages of a loop, from its first stage on, and N to
    2N-1 for the backwards, from its last stage on. Both halves of a backward have its position. A value may
    only be read by the work that makes it and by work that ``precedes`` says comes after, whatever the
    schedule.

    Without slices, all work is in one row. With slices, stages are a grid: neither of stage 1 on slice 0 and
    stage 0 on slice 1 waits for the other. The positions are one of the orders in which the grid can run.

    Attributes:
      numbers: the numbers of the loop's stages, by stage and slice.
    """

    numbers: SliceNumbers

    @property
    def stages(self) -> range:
        """The numbers of the loop's stages, on all slices."""
        return self.numbers.all

    @property
    def slices(self) -> int:
        return self.numbers.slices

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
        """The position of the same stage's work in the other direction: backward or forward."""
        return 2 * self.num_stages - 1 - position

    def precedes(self, first: int, second: int) -> bool:
        """Whether the work at ``first`` is that at ``second``, or ends before it in every schedule."""
        return self.latest((first, second)) == second

    def latest(self, positions: Iterable[int]) -> int:
        """Returns the first position at or after every one of ``positions``."""
        positions = list(positions)
        return self._bound([p for p in positions if self.is_backward(p)] or positions, is_upper=True)

    def earliest(self, positions: Iterable[int]) -> int:
        """Returns the last position at or before every one of ``positions``."""
        positions = list(positions)
        return self._bound([p for p in positions if not self.is_backward(p)] or positions, is_upper=False)

    def _bound(self, positions: list[int], is_upper: bool) -> int:
        """The bound of positions of one direction: the most or the fewest of the stages and slices there."""
        backward, numbers = self.is_backward(positions[0]), self.numbers
        works = [self.work(position) for position in positions]
        choose = min if backward is is_upper else max
        stage = choose(numbers.stage_of(work.stage) for work in works)
        slice_index = choose(numbers.slice_of(work.stage) for work in works)
        return self.position(TaskType("bwd" if backward else "fwd", numbers.number(stage, slice_index)))
