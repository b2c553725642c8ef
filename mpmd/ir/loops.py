"""The loops of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpmd.ir.slices import SliceNumbers
from mpmd.ir.tasks import AnyTask, OutsideTask


@dataclasses.dataclass(frozen=True)
class LoopStages:
    """The stages, slices and microbatches of a loop, and the name of its schedule.

    Attributes:
      num_stages: the number of stages of the model. With ``slices``, each stage has a number on each slice.
      ends: where each stage but the last ends, if ``mpmd.auto_marks`` has chosen it; empty if the user marked
        the ends of stages.
    """

    schedule: str
    first_stage: int
    num_stages: int
    num_microbatches: int
    ends: tuple[str, ...] = ()
    slices: int = 1

    @property
    def numbers(self) -> SliceNumbers:
        return SliceNumbers(self.num_stages, self.slices, self.first_stage)

    @property
    def stages(self) -> range:
        """The numbers of the loop's stages, on all slices."""
        return self.numbers.all

    def __str__(self) -> str:
        first, last = self.stages[0], self.stages[-1]
        stages = f"stages {first} to {last}" if first < last else f"stage {first}"
        slices = f" of {self.num_stages} on {self.slices} slices" if self.slices > 1 else ""
        return f"{self.schedule}: {stages}{slices}, {self.num_microbatches} microbatches"


def with_slice(text: str, task: AnyTask, loops: Sequence[LoopStages]) -> str:
    """The text of a task, with its stage and slice if the microbatches of its loop are cut into slices."""
    if isinstance(task, OutsideTask):
        return text
    number = task.tasks[0].stage
    numbers = next((loop.numbers for loop in loops if number in loop.stages and loop.slices > 1), None)
    return f"{text} ({numbers.stage_text(number)})" if numbers else text


def loop_lines(loops: Sequence[LoopStages]) -> list[str]:
    if len(loops) < 2 and all(loop.slices == 1 for loop in loops):
        return []
    return ["loops:", *(f"  loop {number}, {loop}" for number, loop in enumerate(loops))]


def cut_lines(loops: Sequence[LoopStages]) -> list[str]:
    lines = [
        f"  stage {stage} ends after {end}"
        for loop in loops
        for stage, end in zip(loop.stages, loop.ends, strict=False)
    ]
    return ["stages without marks, cut between layers:", *lines] if lines else []
