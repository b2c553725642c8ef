"""Has groups copy their values, and the copies travel to where they outlive their group."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import Future

from cluster.driver.calls.post_mortem import raised_by
from cluster.recovery.background import Background
from cluster.recovery.copies import Copies
from cluster.recovery.ledger import Ledger
from cluster.recovery.logged import LoggedSnapshot
from cluster.recovery.policy import Recovery, copying_fault
from cluster.recovery.processes import Processes
from cluster.recovery.store import Snapshot
from mpmd.runtime.requests import NOTHING_RELEASED, Release

_DEATH_SECONDS = 90.0
"""The most seconds until the driver hears of a death that made a snapshot fail."""

_LOOK_SECONDS = 1.0
"""The seconds between two looks whether all processes answer again."""


class Snapshots:
    """The snapshots that travel.

    Args:
      ledger: the requests to groups; its lock guards all attributes.
      processes: of the groups.
      copies: of the values of processes.
      policy: when to begin a snapshot, and when a failed snapshot ends the run.
      background: has snapshots travel while steps run.

    Attributes:
      is_due: whether a snapshot is to begin when groups have answered all.
      is_travelling: whether a snapshot travels, or one that is given up has not ended yet.
    """

    def __init__(
        self, ledger: Ledger, processes: Processes, copies: Copies, policy: Recovery, background: Background
    ):
        self.is_due = self.is_travelling = False
        self._ledger = ledger
        self._journal = ledger.journal
        self._processes = processes
        self._copies = copies
        self._policy = policy
        self._background = background

    def note_step(self) -> None:
        self.is_due |= self._policy.snapshot_is_due(self._journal)

    def begin(self) -> None:
        """Has groups, which have answered all, copy their values before they carry out later requests."""
        self.is_due = False
        self.is_travelling = True
        ledger, journal = self._ledger, self._journal
        for mpmd_idx, each in ledger.releases.take(ledger.left_out.groups).items():
            if each != NOTHING_RELEASED:  # nothing else may be asked of groups that are left out for long
                ledger.ask_once({mpmd_idx: Release(each)}, {})
        released, base = ledger.releases.take(ledger.logged), journal.committed
        snapshot = journal.begin_snapshot(released)
        asked = {i: Snapshot(snapshot.number, base, each) for i, each in released.items()}
        copied = list(ledger.groups.ask(asked).values())
        copying = functools.partial(self._copy_away, journal.attempt, snapshot, base, copied)
        self._background.start("snapshot", copying)

    def _copy_away(self, attempt: int, snapshot: LoggedSnapshot, base: int, copied: Sequence[Future]) -> None:
        ledger = self._ledger
        fault: BaseException | None = None
        try:
            for each in copied:
                each.result()
            self._copies.copy_away(snapshot.number, base, lambda: attempt == self._journal.attempt)
        except Exception as error:
            fault = raised_by(error)
            self._await_death(attempt)
        with ledger.changed:
            self.is_travelling = False
            if ledger.error is None and attempt == self._journal.attempt:
                if fault is None:
                    self._journal.mark_copied(attempt, snapshot)
                else:
                    self._give_up(snapshot, fault)
            ledger.notify()

    def _await_death(self, attempt: int) -> None:
        """Waits until the driver has heard of the death that has made a snapshot fail, or all answer."""
        ledger, deadline = self._ledger, time.monotonic() + _DEATH_SECONDS

        def has_ended() -> bool:
            return ledger.error is not None or attempt != self._journal.attempt

        while not has_ended() and time.monotonic() < deadline and self._finds_dead():
            ledger.groups.ask_health()  # else nobody pings a silent process while no reply is awaited
            with ledger.changed:
                ledger.changed.wait_for(has_ended, _LOOK_SECONDS)

    def _finds_dead(self) -> bool:
        try:
            return bool(self._processes.find_dead() - self._ledger.left_out.dead.keys())
        except Exception:  # Ray cannot say
            return False

    def _give_up(self, snapshot: LoggedSnapshot, error: BaseException) -> None:
        if not self._policy.may_go_on(self._journal):
            ending = copying_fault(self._journal, error)
            ending.__cause__ = error
            self._ledger.end(ending)
            return
        self._journal.fail_snapshot()
        self._ledger.releases.give_back(snapshot.released)
        self._background.say_unless_ended(
            f"the groups' values could not be copied, which is tried again after {self._policy.every} steps; "
            f"until then a death goes back to the copies before: {type(error).__name__}: {error}"
        )
