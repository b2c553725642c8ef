"""A schedule that is given by its lists of tasks, in Python or as text."""

from __future__ import annotations

import dataclasses
import os
from typing import Self

from mpmd.ir.plan import Cell
from mpmd.ir.slices import SliceNumbers
from mpmd.schedules.base import Schedule, TaskLists, check_num_microbatches, check_task_lists
from mpmd.schedules.check import check_schedule
from mpmd.schedules.text import read_lists
from mpmd.util.guarded_files import read_text
from mpmd.validation import path_fault, raise_faults, size_fault


@dataclasses.dataclass(frozen=True)
class CustomSchedule(Schedule):
    """Runs the given lists, for the number of microbatches that occur in them.

    ``num_stages``, ``mpmd_dim`` and ``num_microbatches`` follow from the lists::

        CustomSchedule.from_text('''
            0  F0 F1 .  B0--- B1---
            1  .  F0 B0--- F1 B1---
        ''')

    Args:
      lists: the cells of each group, first to last.
      slices: the number of slices of each microbatch. Stage ``s`` on slice ``k`` is numbered
        ``k * num_stages + s``. Text names slices as ``F0s3``: slice 3 of microbatch 0.

    Raises ``ScheduleError``, a ``ValueError``, for lists that cannot run; see ``check_schedule``.
    """

    num_stages: int = dataclasses.field(init=False)
    mpmd_dim: int = dataclasses.field(init=False)
    num_microbatches: int = dataclasses.field(init=False)
    lists: TaskLists = dataclasses.field(repr=False)
    slices: int = 1

    __repr__ = Schedule.__repr__

    def __post_init__(self) -> None:
        check_task_lists("lists", self.lists)
        raise_faults(size_fault(f"{self.name}'s slices", self.slices))
        lists = tuple(map(tuple, self.lists))
        tasks = [task for cells in lists for cell in cells if isinstance(cell, Cell) for task in cell.tasks]
        object.__setattr__(self, "lists", lists)
        total = 1 + max((task.stage for task in tasks), default=self.slices - 1)
        object.__setattr__(self, "num_stages", SliceNumbers.of(total, self.slices).num_stages)
        object.__setattr__(self, "mpmd_dim", len(lists))
        object.__setattr__(self, "num_microbatches", 1 + max((task.microbatch for task in tasks), default=0))
        super().__post_init__()
        check_schedule(lists, self.num_stages, self.num_microbatches, slices=self.slices)

    @classmethod
    def of_size(cls, num_stages: int, mpmd_dim: int) -> Self:
        raise ValueError(f"{cls.__name__} has the size of its lists; make one of lists of that size")

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Reads the lists in any form that ``mpmd.schedules.text`` describes.

        Raises ``ValueError`` with the line and column of all text that is no cell.
        """
        read = read_lists(text)
        return cls(read.lists, read.slices)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Reads the lists from a file, as ``from_text`` does.

        Raises also ``OSError`` unless it is a regular file, and small enough to be a schedule.
        """
        raise_faults(path_fault("path", path))
        return cls.from_text(read_text(path))

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        """The lists. Raises ``ValueError`` for another number of microbatches than theirs."""
        check_num_microbatches(num_microbatches)
        if num_microbatches != self.num_microbatches:
            raise ValueError(
                f"{self.name} has the tasks of {self.num_microbatches} microbatches, "
                f"got num_microbatches={num_microbatches}; use as many, or write lists for that number"
            )
        return [list(cells) for cells in self.lists]
