"""Sends the copies of processes' values to processes that keep them, and back after a death."""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import ray

from cluster.protocol.process_info import ProcessInfo
from cluster.recovery.journal import BEGINNING
from cluster.recovery.processes import Calls, Processes
from mpmd.runtime.requests import Handle


class CopiesLostError(RuntimeError):
    """No good copy of some process's snapshot is left: all holders have died, or their copies are damaged."""


class MissingCopy(NamedTuple):
    owner: int
    src: int
    dst: int


class Copies:
    """Knows which process keeps whose snapshots, in its host's memory.

    Methods block, and raise the errors of ``Processes.wait_for``.

    Args:
      left_out: the groups that have no snapshots and keep none.
    """

    def __init__(self, processes: Processes, left_out: Collection[int] = ()):
        self._processes = processes
        self._left_out = left_out
        self._keepers = choose_keepers(processes.infos, left_out)
        self._holders: dict[int, set[int]] = {}  # of each process's committed snapshot
        self._damage: dict[int, list[str]] = {}  # of copies of a process's values
        self.mark_committed()

    def mark_committed(self) -> None:
        self._holders = {owner: {owner, keeper} for owner, keeper in self._keepers.items()}
        self._damage.clear()

    def lose(self, processes: Iterable[int]) -> None:
        for holders in self._holders.values():
            holders.difference_update(processes)

    def check(self, snapshot: int) -> tuple[str, ...]:
        """Compares all copies of the committed snapshot with their digests; a damaged copy is not used.

        Returns: a text about each damaged copy, for people.
        Raises: ``CopiesLostError`` when no process has a good copy of some process's values.
        """
        if snapshot == BEGINNING:
            return ()
        checking: Calls = {
            actor.find_damaged.remote(snapshot, held): i
            for i, actor in enumerate(self._processes.actors)
            if (held := [owner for owner, holders in self._holders.items() if i in holders])
        }
        self._processes.wait_for(checking)
        damaged = [
            self._lose_copy(owner, holder, handles)
            for call, holder in checking.items()
            for owner, handles in ray.get(call).items()
        ]
        if lost := [owner for owner, holders in self._holders.items() if not holders]:
            raise CopiesLostError(" and ".join(map(self._loss_of, lost)))
        return tuple(damaged)

    def go_back(self, snapshot: int) -> tuple[str, ...]:
        """Has all groups, which have answered all requests, go back to a snapshot. As ``check``."""
        damaged = self.check(snapshot)
        self.restore(snapshot)
        return damaged

    def _lose_copy(self, owner: int, holder: int, handles: Sequence[Handle]) -> str:
        self._holders[owner].discard(holder)
        values = f"value{'s' if len(handles) > 1 else ''} {', '.join(map(str, handles))}"
        endpoints = self._processes.endpoints
        text = f"{endpoints[holder].name} has a damaged copy of {values} of {endpoints[owner].name}"
        self._damage.setdefault(owner, []).append(text)
        print(f"cluster: {text}, whose bytes have changed; it is not used", file=sys.stderr, flush=True)
        return text

    def _loss_of(self, owner: int) -> str:
        endpoints = self._processes.endpoints
        name, keeper = endpoints[owner].name, endpoints[self._keepers[owner]].name
        if damage := self._damage.get(owner):
            return f"{' and '.join(damage)}, and there is no other copy"
        return f"{name} and {keeper}, which kept its values, have died together"

    def copy_away(self, snapshot: int, base: int, is_wanted: Callable[[], bool]) -> None:
        """Copies what every process has copied for a snapshot, and not for the base, to its keeper.

        Raises: ``SupersededError`` when it is no longer wanted, and when a process dies whatever Ray raises.
        """
        copies = [MissingCopy(owner, owner, keeper) for owner, keeper in self._keepers.items()]
        self._copy(copies, snapshot, base, is_wanted)

    def restore(self, snapshot: int) -> None:
        """Restores a snapshot in all processes, and copies snapshots that have lost a holder again.

        So any group may die next. Groups that are left out keep their present values.
        """
        keepers = choose_keepers(self._processes.infos, self._left_out)
        if snapshot != BEGINNING:
            self._copy(missing_copies(self._holders, keepers), snapshot, BEGINNING)
        self._keepers = keepers
        if snapshot != BEGINNING:
            self.mark_committed()
        kept = {i: [owner for owner, keeper in keepers.items() if keeper == i] for i in keepers}
        actors = self._processes.actors
        self._processes.wait_for({actors[i].restore.remote(snapshot, kept[i]): i for i in kept})

    def _copy(
        self,
        copies: Sequence[MissingCopy],
        snapshot: int,
        base: int,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Copies chunk by chunk, so that neither the driver nor Ray's memory has to hold a whole snapshot."""
        actors, wait_for = self._processes.actors, self._processes.wait_for
        for index in itertools.count():
            if not copies:
                return
            chunks: list[ray.ObjectRef] = [
                actors[c.src].hand_over.remote(c.owner, snapshot, base, index) for c in copies
            ]
            # An actor's later calls wait for those whose arguments are not there yet, so they have to be.
            handing_over = {chunk: copy.src for chunk, copy in zip(chunks, copies, strict=True)}
            wait_for(handing_over, is_wanted, fetch=False)
            keeping: Calls = {
                actors[c.dst].keep.remote(c.owner, snapshot, base, index, chunk): c.dst
                for c, chunk in zip(copies, chunks, strict=True)
            }
            del chunks, handing_over
            wait_for(keeping, is_wanted)
            are_whole = ray.get(list(keeping))
            copies = [copy for copy, is_whole in zip(copies, are_whole, strict=True) if not is_whole]


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
