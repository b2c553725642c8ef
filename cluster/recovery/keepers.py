"""Assigns copies to the processes that keep them, and finds the copies that are lost with dead processes.

Nothing here knows Ray, a thread or the clock.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from cluster.protocol.process_info import ProcessInfo


class CopiesLostError(RuntimeError):
    """No good copy of some process's snapshot is left: all holders have died, or their copies are damaged."""


def choose_keepers(processes: Sequence[ProcessInfo], left_out: Collection[int] = ()) -> dict[int, int]:
    """Chooses for each process a keeper: a process of another group that keeps its snapshots in host memory.

    A keeper on another node is preferred, then the process that keeps the fewest snapshots, then a process of
    the next group. Processes are named by their positions.

    Args:
      processes: the processes of all groups, group by group.
      left_out: the groups that have no snapshots and keep none; two groups at least remain, or none.
    """
    num_groups = processes[-1].mpmd_idx + 1
    kept: collections.Counter[int] = collections.Counter()
    keepers: dict[int, int] = {}
    taking_part = [i for i, process in enumerate(processes) if process.mpmd_idx not in left_out]
    for number in taking_part:
        owner = processes[number]
        others = [i for i in taking_part if processes[i].mpmd_idx != owner.mpmd_idx]
        keeper = min(
            others,
            key=lambda i: (
                processes[i].node_id == owner.node_id,
                kept[i],
                (processes[i].mpmd_idx - owner.mpmd_idx) % num_groups,
                abs(processes[i].rank - owner.rank),
            ),
        )
        kept[keeper] += 1
        keepers[number] = keeper
    return keepers


class Copy(NamedTuple):
    """The snapshot of a process is to be copied from one process to another."""

    owner: int
    src: int
    dst: int


class CopyHolders:
    """The processes that have the committed snapshot of each, itself and its keeper, by their positions."""

    def __init__(self, keepers: Mapping[int, int]):
        self._holders = {owner: {owner, keeper} for owner, keeper in keepers.items()}

    def lose(self, processes: Iterable[int]) -> None:
        """These processes are gone, with all they had."""
        for holders in self._holders.values():
            holders.difference_update(processes)

    def lose_copy(self, owner: int, holder: int) -> None:
        """The copy that this process has is of no use."""
        self._holders[owner].discard(holder)

    def held_by(self, process: int) -> list[int]:
        """The processes whose snapshot a process has."""
        return [owner for owner, holders in self._holders.items() if process in holders]

    @property
    def lost(self) -> list[int]:
        """The processes whose snapshot no process has."""
        return [owner for owner, holders in self._holders.items() if not holders]

    def missing(self, keepers: Mapping[int, int]) -> list[Copy]:
        """The copies to make so that every process and its keeper have its snapshot."""
        return [
            Copy(owner, owner if owner in holders else min(holders), holder)
            for owner, holders in self._holders.items()
            for holder in (owner, keepers[owner])
            if holder not in holders
        ]
