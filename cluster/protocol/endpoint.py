"""The processes of all groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpmd.ir.reshard import GroupShape


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A process of a group. The processes of all groups are numbered group by group.

    Where every group has one process, a process has the number of its group.

    Attributes:
      mpmd_idx, rank: the group, and the process's number in it.
      num_processes: of each group.
    """

    mpmd_idx: int
    rank: int
    num_processes: tuple[int, ...]

    @property
    def number(self) -> int:
        """The process's number among the processes of all groups."""
        return self.number_of(self.mpmd_idx, self.rank)

    @property
    def name(self) -> str:
        """The name in messages to users."""
        return self.name_of(self.number)

    def number_of(self, mpmd_idx: int, rank: int) -> int:
        """The number of process ``rank`` of group ``mpmd_idx`` among the processes of all groups."""
        return sum(self.num_processes[:mpmd_idx]) + rank

    def name_of(self, number: int) -> str:
        """A process's name in messages to users: ``group 1``, or ``group 1, process 0`` of several."""
        for mpmd_idx, count in enumerate(self.num_processes):
            if number < count:
                return f"group {mpmd_idx}" + (f", process {number}" if count > 1 else "")
            number -= count
        raise AssertionError(f"there are {sum(self.num_processes)} processes")


def endpoints(num_processes: Sequence[int]) -> tuple[Endpoint, ...]:
    """All processes, in the order of their numbers; ``num_processes`` has the count of each group."""
    counts = tuple(num_processes)
    return tuple(Endpoint(i, rank, counts) for i, count in enumerate(counts) for rank in range(count))


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a group.

    Attributes:
      mpmd_idx: the group.
      rank: the process's number in it.
      groups: the shape of every group.
    """

    mpmd_idx: int
    rank: int
    groups: tuple[GroupShape, ...]

    @property
    def shape(self) -> GroupShape:
        return self.groups[self.mpmd_idx]

    @property
    def endpoint(self) -> Endpoint:
        """The process as the transports address it."""
        return Endpoint(self.mpmd_idx, self.rank, tuple(group.num_processes for group in self.groups))
