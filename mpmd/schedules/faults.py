"""The faults of lists of tasks, and a grid that shows where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpmd.ir.plan import Cell
from mpmd.ir.slices import SliceNumbers
from mpmd.schedules.text import short_text
from mpmd.util.grouping import grouped

CellPosition = tuple[int, int]
"""The group of a cell, and the index of the cell in the group's list."""

_FAULTS, _ROWS, _CELLS, _NEAR = 20, 12, 12, 2
"""The most faults listed, rows drawn and cells drawn in a row; the cells drawn on either side of a mark."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of the lists, and the cells that it concerns; a missing task has no cells."""

    message: str
    cells: tuple[CellPosition, ...] = ()


class ScheduleError(ValueError):
    """Lists of tasks that cannot run. The message numbers the faults, and marks their cells in the lists.

    Attributes:
      faults: all faults; the message lists the first 20.
    """

    def __init__(
        self,
        summary: str,
        faults: Sequence[Fault],
        tasks: Sequence[Sequence[Any]],
        numbers: SliceNumbers,
    ):
        super().__init__(summary, faults, tasks, numbers)
        self.faults = tuple(faults)
        lines = [f"  [{i}] {fault.message}" for i, fault in enumerate(self.faults[:_FAULTS], start=1)]
        if len(self.faults) > _FAULTS:
            lines.append(f"  and {len(self.faults) - _FAULTS} more")
        grid = marked_grid(tasks, self.faults[:_FAULTS], numbers)
        self._message = "\n".join([summary, *lines, *(["", grid] if grid else [])])

    def __str__(self) -> str:
        return self._message


def marked_grid(tasks: Sequence[Sequence[Any]], faults: Sequence[Fault], numbers: SliceNumbers) -> str:
    """The lists by position, one row per group, with the number of each fault after its cells::

        0  F0     B0[1]  B0[1]  (9)
        1  B0[2]  F0[2]  (10)

    Lists of over 12 cells are drawn near their marks, and ``(9)`` stands for nine cells that are left out.
    With over 12 groups, only groups with marks are drawn. The grid is empty if no fault has cells.
    """
    marks = grouped(
        (cell, number) for number, fault in enumerate(faults, start=1) for cell in dict.fromkeys(fault.cells)
    )
    marked = sorted({mpmd_idx for mpmd_idx, _ in marks})
    if not marked:
        return ""
    with_stage = stages_need_names(tasks, numbers)
    rows = marked if len(tasks) > _ROWS else range(len(tasks))
    shown = [
        _row(tasks[row], row, marks, lambda cell: _text(cell, with_stage, numbers)) for row in rows[:_ROWS]
    ]
    width = max((len(text) for row in shown for text in row), default=0)
    label = len(str(len(tasks) - 1))
    lines = [
        f"    {row:>{label}}  {'  '.join(text.ljust(width) for text in texts)}".rstrip()
        for row, texts in zip(rows, shown, strict=False)
    ]
    if unshown := len(tasks) - len(shown):
        lines.append(f"    and {unshown} more groups, {len(marked[_ROWS:]) or 'none'} of them with marks")
    return "\n".join(lines)


def stages_need_names(tasks: Sequence[Sequence[Any]], numbers: SliceNumbers) -> bool:
    """Whether some group runs a stage of another number than its own."""
    return any(
        numbers.stage_of(task.stage) != mpmd_idx
        for mpmd_idx, cells in enumerate(tasks)
        for cell in cells
        if isinstance(cell, Cell)
        for task in cell.tasks
    )


def _row(
    cells: Sequence[Any],
    mpmd_idx: int,
    marks: Mapping[CellPosition, Sequence[int]],
    text: Callable[[Any], str],
) -> list[str]:
    shown = _near(len(cells), [index for group, index in marks if group == mpmd_idx])
    texts: list[str] = []
    end = 0
    for index in [*shown, len(cells)]:
        if index > end:
            texts.append(f"({index - end})")
        if index < len(cells):
            numbers = "".join(f"[{number}]" for number in marks.get((mpmd_idx, index), ()))
            texts.append(text(cells[index]) + numbers)
        end = index + 1
    return texts


def _near(length: int, marked: Sequence[int]) -> Sequence[int]:
    """The positions of a list that are drawn: all, or the first 12 near a mark."""
    if length <= _CELLS:
        return range(length)
    near = {i for mark in marked for i in range(mark - _NEAR, mark + _NEAR + 1) if 0 <= i < length}
    return (sorted(near) or range(length))[:_CELLS]


def _text(cell: Any, with_stage: bool, numbers: SliceNumbers) -> str:
    return (isinstance(cell, Cell) and short_text(cell, with_stage, numbers)) or repr(cell)[:16]
