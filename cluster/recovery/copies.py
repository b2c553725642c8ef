"""Sends the copies of processes' values to processes that keep them, and back after a death."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence

import ray
from ray.actor import ActorHandle

from cluster.protocol.endpoint import Endpoint
from cluster.protocol.process_info import ProcessInfo
from cluster.recovery.journal import BEGINNING
from cluster.recovery.keepers import CopiesLostError, Copy, CopyHolders, choose_keepers
from cluster.recovery.liveness_waiter import Calls, LivenessWaiter
from mpmd.runtime.requests import Handle


class Copies:
    """Knows which process keeps whose snapshots, in its host's memory.

    Methods block, and raise the errors of ``LivenessWaiter``.

    Args:
      actors: the actor of each process; a caller that replaces an actor changes this list.
      processes: the group and rank of each process.
      infos: where the processes run.
      waiter: waits for calls on processes.
      left_out: the groups that have no snapshots and keep none.
    """

    def __init__(
        self,
        actors: Sequence[ActorHandle],
        processes: Sequence[Endpoint],
        infos: Sequence[ProcessInfo],
        waiter: LivenessWaiter,
        left_out: Collection[int] = (),
    ):
        self._actors = actors
        self._processes = processes
        self._waiter = waiter
        self._left_out = left_out
        self._keepers = choose_keepers(infos, left_out)
        self._holders = CopyHolders(self._keepers)
        self._damage: dict[int, list[str]] = {}  # of copies of a process's values

    def lose(self, processes: Iterable[int]) -> None:
        """These processes are gone, with all that they had and kept."""
        self._holders.lose(processes)

    def check(self, snapshot: int) -> tuple[str, ...]:
        """Compares all copies of the committed snapshot with their digests; a damaged copy is not used.

        Returns: a text about each damaged copy, for people.
        Raises: ``CopiesLostError`` when no process has a good copy of some process's values.
        """
        if snapshot == BEGINNING:
            return ()
        holding = {i: held for i in range(len(self._actors)) if (held := self._holders.held_by(i))}
        checking: Calls = {
            self._actors[i].find_damaged.remote(snapshot, held): i for i, held in holding.items()
        }
        self._waiter.wait_for(checking)
        damaged = [
            self._lose_copy(owner, holder, handles)
            for call, holder in checking.items()
            for owner, handles in ray.get(call).items()
        ]
        if lost := self._holders.lost:
            raise CopiesLostError(" and ".join(map(self._loss_of, lost)))
        return tuple(damaged)

    def _lose_copy(self, owner: int, holder: int, handles: Sequence[Handle]) -> str:
        self._holders.lose_copy(owner, holder)
        values = f"value{'s' if len(handles) > 1 else ''} {', '.join(map(str, handles))}"
        text = (
            f"{self._processes[holder].name} has a damaged copy of {values} of {self._processes[owner].name}"
        )
        self._damage.setdefault(owner, []).append(text)
        print(f"cluster: {text}, whose bytes have changed; it is not used", file=sys.stderr, flush=True)
        return text

    def _loss_of(self, owner: int) -> str:
        name, keeper = self._processes[owner].name, self._processes[self._keepers[owner]].name
        if damage := self._damage.get(owner):
            return f"{' and '.join(damage)}, and there is no other copy"
        return f"{name} and {keeper}, which kept its values, have died together"

    def copy_away(self, snapshot: int, base: int, is_wanted: Callable[[], bool]) -> None:
        """Copies what every process has copied for a snapshot, and not for the base, to its keeper.

        Raises: ``SupersededError`` when it is no longer wanted, and when a process dies whatever Ray raises.
        """
        copies = [Copy(owner, owner, keeper) for owner, keeper in self._keepers.items()]
        self._copy(copies, snapshot, base, is_wanted)

    def mark_committed(self) -> None:
        """The last snapshot is committed: all processes and their keepers have it."""
        self._holders = CopyHolders(self._keepers)
        self._damage.clear()

    def restore(self, snapshot: int, infos: Sequence[ProcessInfo]) -> None:
        """Restores a snapshot in all processes, and copies snapshots that have lost a holder again.

        So any group may die next. Groups that are left out keep their present values.
        """
        keepers = choose_keepers(infos, self._left_out)
        if snapshot != BEGINNING:
            self._copy(self._holders.missing(keepers), snapshot, BEGINNING)
            self._holders = CopyHolders(keepers)
            self._damage.clear()
        self._keepers = keepers
        kept = {i: [owner for owner, keeper in keepers.items() if keeper == i] for i in keepers}
        self._waiter.wait_for({self._actors[i].restore.remote(snapshot, kept[i]): i for i in kept})

    def _copy(
        self, copies: Sequence[Copy], snapshot: int, base: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Copies chunk by chunk, so that neither the driver nor Ray's memory has to hold a whole snapshot."""
        actors = self._actors
        counting: Calls = {
            actors[copy.src].count_chunks.remote(copy.owner, snapshot, base): copy.src for copy in copies
        }
        self._waiter.wait_for(counting, is_wanted)
        counts = dict(zip(copies, ray.get(list(counting)), strict=True))
        for index in range(max(counts.values(), default=0)):
            current = [copy for copy in copies if index < counts[copy]]
            chunks: list[ray.ObjectRef] = [
                actors[c.src].hand_over.remote(c.owner, snapshot, base, index) for c in current
            ]
            # An actor's later calls wait for those whose arguments are not there yet, so they have to be.
            handing_over = {chunk: copy.src for chunk, copy in zip(chunks, current, strict=True)}
            self._waiter.wait_for(handing_over, is_wanted, fetch=False)
            keeping: Calls = {
                actors[c.dst].keep.remote(c.owner, snapshot, base, index, chunk): c.dst
                for c, chunk in zip(current, chunks, strict=True)
            }
            del chunks, handing_over
            self._waiter.wait_for(keeping, is_wanted)
