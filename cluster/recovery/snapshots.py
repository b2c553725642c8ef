"""Has groups copy all values now and then, and the copies travel to where they outlive their group.

What follows when a group dies meanwhile is in ``journal.py``.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from cluster.driver.calls.ray_errors import is_death, raised_by
from cluster.recovery.liveness_waiter import ProcessLostError, SupersededError
from cluster.recovery.logged import LoggedSnapshot
from cluster.recovery.policy import Recovery
from cluster.recovery.requests import FROM_DISK, Requests

_DEATH_SECONDS = 90.0
"""The seconds within which the driver hears of a death that made a snapshot fail."""


class Snapshots:
    """Begins snapshots, and commits them. Whoever calls holds the requests' lock.

    Args:
      requests: what groups were asked.
      policy: when to copy.
    """

    def __init__(self, requests: Requests, policy: Recovery):
        self._requests = requests
        self._policy = policy

    def are_in_time(self) -> bool:
        """Whether a step need not wait for a snapshot; what is being saved does not keep it waiting."""
        requests, journal = self._requests, self._requests.journal
        if self._policy.is_late(journal) and journal.keeps_copies and not requests.dead:
            requests.note(journal.drop_copies)
        return not self._policy.is_late(journal)

    def begin_if_due(self) -> None:
        """Begins a snapshot if it is time for one, after a step."""
        if self._policy.snapshot_is_due(self._requests.journal):
            self.begin()

    def begin(self) -> None:
        """Has groups copy their values, as soon as they have carried out what they were asked."""
        requests = self._requests
        snapshot = requests.journal.begin_snapshot(requests.take_released(range(requests.num_groups)))
        try:
            self.ask(snapshot)
        except BaseException:  # an interrupt: perhaps nobody waits for the copies
            requests.journal.abandon(snapshot)
            requests.give_back(snapshot.released)
            raise

    def ask(self, snapshot: LoggedSnapshot) -> None:
        """Asks groups for the copies of a snapshot, for the first time or again."""
        numbers = (snapshot.number, self._requests.journal.committed)
        copying: list[Future] = []
        try:
            for mpmd_idx, released in snapshot.released.items():
                copying += self._requests.groups.call_group(mpmd_idx, "snapshot", *numbers, released)
        except RuntimeError:
            return  # a group has died, and all is asked again; or the mesh was closed
        attempt = self._requests.journal.attempt
        copy_away = functools.partial(self._copy_away, attempt, snapshot, numbers, copying)
        threading.Thread(target=copy_away, name="mpmd snapshot", daemon=True).start()

    def _copy_away(
        self, attempt: int, snapshot: LoggedSnapshot, numbers: tuple[int, int], copying: Sequence[Future]
    ) -> None:
        """In a thread of its own: has copies that processes make travel to others, while steps run."""
        requests, journal = self._requests, self._requests.journal
        try:
            for copied in copying:
                copied.result()
            requests.pool.copies.copy_away(*numbers, lambda: attempt == journal.attempt)
        except SupersededError:
            pass
        except Exception as error:  # a consequence of a death, of which the driver will hear, or a fault
            self._fail(attempt, snapshot, raised_by(error))
        else:
            requests.note(lambda: journal.mark_copied(attempt, snapshot))

    def _fail(self, attempt: int, snapshot: LoggedSnapshot, error: BaseException) -> None:
        """Drops a snapshot, and ends the run when the log can no longer do without one."""
        requests, journal = self._requests, self._requests.journal
        why = f"{type(error).__name__}: {error}"
        with requests.changed:
            if attempt != journal.attempt or requests.error is not None:
                return
            if self._policy.may_go_on(journal):
                journal.fail_snapshot(snapshot)
                requests.give_back(snapshot.released)
                requests.changed.notify_all()
                if not is_death(error) and not isinstance(error, ProcessLostError):  # which is told by itself
                    print(
                        "cluster: the groups' values could not be copied, which is tried again after "
                        f"{self._policy.every} steps; until then a death goes back to the copies before: "
                        f"{why}",
                        file=sys.stderr,
                        flush=True,
                    )
                return
            times = journal.num_failed + 1
        if requests.pool.find_dead():  # which is why, and the driver will hear of it
            requests.wait_for_end_of(attempt, seconds=_DEATH_SECONDS)
        with requests.changed:
            if attempt == journal.attempt:
                fault = RuntimeError(
                    f"the groups' values could not be copied {times} times in a row, the last time because "
                    f"{why}. The log of steps that a death would repeat may not grow any more. A process "
                    "needs host memory for up to four times its part of the values: use hosts with more "
                    "memory or fewer processes each, or launch without recovery and save checkpoints. "
                    f"{FROM_DISK}"
                )
                requests.give_up(fault, error)
