"""The numbers of stages on slices of a microbatch.

A slice of a microbatch is a further pass through the stages: stage ``s`` of ``c`` on slice ``k`` is numbered
``k * c + s``, and runs on the group of stage ``s``. So a task stays a kind, a stage number and a microbatch.
Slice ``k`` reads what the slices before it hand on, such as keys and values. Stages on slices are therefore a
grid of ``c`` by ``S``::

    forward of (k, s)     after the forwards of (k, s - 1) and (k - 1, s)
    backward of (k, s)    after its own forward and the backwards of (k, s + 1) and (k + 1, s)
"""

from __future__ import annotations

import dataclasses

from mpmd.ir.tasks import Cell, FusedTask, Task


@dataclasses.dataclass(frozen=True)
class SliceNumbers:
    """The numbers of ``num_stages`` stages on ``slices`` slices, from ``first`` on."""

    num_stages: int
    slices: int = 1
    first: int = 0

    @classmethod
    def of(cls, total: int, slices: int) -> SliceNumbers:
        """Divides ``total`` numbers among slices; raises ``ValueError`` unless each gets as many."""
        if total % slices:
            raise ValueError(
                f"{slices} slices pass the same stages, so that stages are numbered up to a multiple of "
                f"{slices}; got the numbers 0 to {total - 1}"
            )
        return cls(total // slices, slices)

    @property
    def all(self) -> range:
        return range(self.first, self.first + self.num_stages * self.slices)

    def of_stage(self, stage: int) -> range:
        return self.all[stage :: self.num_stages]

    def number(self, stage: int, slice_index: int) -> int:
        return self.first + slice_index * self.num_stages + stage

    def stage_of(self, number: int) -> int:
        return (number - self.first) % self.num_stages

    def slice_of(self, number: int) -> int:
        return (number - self.first) // self.num_stages

    def before(self, number: int) -> list[int]:
        """The numbers whose forwards the forward of ``number`` waits for."""
        one = [number - 1] if self.stage_of(number) else []
        return one + ([number - self.num_stages] if self.slice_of(number) else [])

    def after(self, number: int) -> list[int]:
        """The numbers whose backwards the backward of ``number`` waits for."""
        one = [number + 1] if self.stage_of(number) + 1 < self.num_stages else []
        return one + ([number + self.num_stages] if self.slice_of(number) + 1 < self.slices else [])

    def task_text(self, cell: Cell) -> str:
        """A cell as text: ``fwd_2__1``, or with slices ``fwd_2__1s3`` for slice 3 of microbatch 1."""
        if self.slices == 1:
            return str(cell)
        texts = [f"{t.kind}_{self.stage_of(t.stage)}__{t.microbatch}{self.suffix(t)}" for t in cell.tasks]
        return f"FusedTask({', '.join(texts)})" if isinstance(cell, FusedTask) else texts[0]

    def stage_text(self, number: int, loop: str = "") -> str:
        """The name of a number to users: ``stage 2``, or with slices ``stage 2, slice 3``.

        Args:
          loop: text that follows the stage, such as `` of loop 1``.
        """
        slice_text = "" if self.slices == 1 else f", slice {self.slice_of(number)}"
        return f"stage {self.stage_of(number)}{loop}{slice_text}"

    def suffix(self, task: Task) -> str:
        """The slice of a task as its text ends: ``s3``, or nothing where there is one slice."""
        return "" if self.slices == 1 else f"s{self.slice_of(task.stage)}"
