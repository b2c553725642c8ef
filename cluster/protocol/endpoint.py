"""The processes of all groups."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence

from mpmd.ir.reshard import GroupShape

DRIVER = -1
"""The number of the driver among processes that connect with one another."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A process of a group. The processes of all groups are numbered group by group.

    Where every group has one process, a process has the number of its group.

    Attributes:
      mpmd_idx, rank: the group, and the process's number in it.
      groups: the shape of every group.
    """

    mpmd_idx: int
    rank: int
    groups: tuple[GroupShape, ...] = dataclasses.field(hash=False)

    @property
    def shape(self) -> GroupShape:
        return self.groups[self.mpmd_idx]

    @functools.cached_property
    def num_processes(self) -> tuple[int, ...]:
        return tuple(group.num_processes for group in self.groups)

    @functools.cached_property
    def number(self) -> int:
        return self.number_of(self.mpmd_idx, self.rank)

    @property
    def name(self) -> str:
        return self.name_of(self.number)

    @property
    def partners(self) -> frozenset[int]:
        """The processes with which this one agrees: for rank 0 the rest of its group, otherwise rank 0."""
        first = self.number_of(self.mpmd_idx, 0)
        return frozenset([first] if self.rank else range(first + 1, first + self.shape.num_processes))

    def number_of(self, mpmd_idx: int, rank: int) -> int:
        return sum(self.num_processes[:mpmd_idx]) + rank

    def group_of(self, number: int) -> int:
        return bisect.bisect_right(list(itertools.accumulate(self.num_processes)), number)

    def name_of(self, number: int) -> str:
        """A process's name in messages to users: ``group 1``, or ``group 1, process 0`` of several."""
        mpmd_idx = self.group_of(number)
        rank = number - self.number_of(mpmd_idx, 0)
        return f"group {mpmd_idx}" + (f", process {rank}" if self.num_processes[mpmd_idx] > 1 else "")


def endpoints(groups: Sequence[GroupShape]) -> tuple[Endpoint, ...]:
    shapes = tuple(groups)
    return tuple(
        Endpoint(i, rank, shapes) for i, group in enumerate(shapes) for rank in range(group.num_processes)
    )
