"""Decisions about snapshots under way and failed snapshots: a part of the state machine of ``membership``."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from cluster.recovery import actions as do
from cluster.recovery.actions import Actions
from cluster.recovery.journal import BEGINNING, Journal
from cluster.recovery.logged import LoggedSnapshot
from cluster.recovery.policy import Recovery


class Snapshots:
    """The snapshots that travel to their keepers.

    Args:
      journal: has the snapshots.
      policy: when to begin a snapshot, and when a failed snapshot ends the run.
    """

    def __init__(self, journal: Journal, policy: Recovery):
        self._journal = journal
        self._policy = policy
        self._num_copying = 0
        self._marked = BEGINNING  # the snapshot of the last ``MarkCommitted``

    @property
    def is_copying(self) -> bool:
        """Whether a snapshot travels, or one that is given up is not told yet."""
        return self._num_copying > 0

    def copy(self, snapshot: LoggedSnapshot, copied: Sequence[Future]) -> Actions:
        """Groups were asked for the copies of a snapshot."""
        self._num_copying += 1
        return [do.CopyAway(self._journal.attempt, snapshot, self._journal.committed, copied)]

    def end_copying(self) -> None:
        self._num_copying -= 1

    def mark_committed(self) -> Actions:
        """The journal may have committed a snapshot, or lost all of them."""
        if self._marked == self._journal.committed:
            return []
        self._marked = self._journal.committed
        return [] if self._marked == BEGINNING else [do.MarkCommitted()]

    def fail(self, copying: do.CopyAway, error: BaseException, by_death: bool) -> Actions:
        """Goes on without a snapshot if the log may still grow; else looks for a death that explains it."""
        if copying.attempt != self._journal.attempt:
            return []
        if not self._policy.may_go_on(self._journal):
            return [do.AwaitDeath(copying, error)]
        self._journal.fail_snapshot(copying.snapshot)
        giving_back = do.GiveBack(copying.snapshot)
        if by_death:  # which is told by itself
            return [giving_back]
        message = (
            f"the groups' values could not be copied, which is tried again after {self._policy.every} steps; "
            f"until then a death goes back to the copies before: {type(error).__name__}: {error}"
        )
        return [giving_back, do.Say(message)]
