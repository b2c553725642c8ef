"""Assigns copies to the processes that keep them, and finds the copies that are missing after deaths.

Nothing here knows Ray, a thread or the clock.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
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


class MissingCopy(NamedTuple):
    owner: int
    src: int
    dst: int


def missing_copies(holders: Mapping[int, Collection[int]], keepers: Mapping[int, int]) -> list[MissingCopy]:
    """The copies to make so that every process and its keeper have its snapshot.

    Args:
      holders: the processes that have the snapshot of each.
    """
    return [
        MissingCopy(owner, owner if owner in having else min(having), holder)
        for owner, having in holders.items()
        for holder in (owner, keepers[owner])
        if holder not in having
    ]
