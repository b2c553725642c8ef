"""Assigns copies to the processes that keep them, and finds those that a death has taken.

Nothing here knows Ray, a thread or the clock.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from cluster.protocol.process_info import ProcessInfo


class CopiesLostError(RuntimeError):
    """No process has the snapshot of one: those that had it have died, or their copies are damaged."""


def choose_keepers(processes: Sequence[ProcessInfo], left_out: Collection[int] = ()) -> dict[int, int]:
    """The process that keeps the snapshots of each, in its host's memory: one of another group.

    It is on another node if there is one, and all keep as many as the others, as far as possible; then it is
    of the next group. All are named by their positions.

    Args:
      processes: of all groups, group by group.
      left_out: the groups that have no snapshots and keep none; there are two others at least, or none.
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
