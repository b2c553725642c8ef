"""The loops of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class LoopStages:
    """The stages and microbatches of a loop, and the name of its schedule.

    Attributes:
      ends: where each stage but the last ends, if ``mpmd.auto_marks`` has chosen it; empty if the user marked
        the ends of stages.
    """

    schedule: str
    first_stage: int
    num_stages: int
    num_microbatches: int
    ends: tuple[str, ...] = ()

    @property
    def stages(self) -> range:
        """The numbers of its stages."""
        return range(self.first_stage, self.first_stage + self.num_stages)

    def __str__(self) -> str:
        first, last = self.stages[0], self.stages[-1]
        stages = f"stages {first} to {last}" if self.num_stages > 1 else f"stage {first}"
        return f"{self.schedule}: {stages}, {self.num_microbatches} microbatches"


def loop_lines(loops: Sequence[LoopStages]) -> list[str]:
    """Loops as text, if there are several."""
    if len(loops) < 2:
        return []
    return ["loops:", *(f"  loop {number}, {loop}" for number, loop in enumerate(loops))]


def cut_lines(loops: Sequence[LoopStages]) -> list[str]:
    """The ends of the stages that ``mpmd.auto_marks`` has chosen, as text; none if the user marked all."""
    lines = [
        f"  stage {stage} ends after {end}"
        for loop in loops
        for stage, end in zip(loop.stages, loop.ends, strict=False)
    ]
    return ["stages without marks, cut between layers:", *lines] if lines else []
