"""Recovery from the death of a group, and from the failure of a step that has taken its inputs over.

A thread has the group replaced and all groups go back to the last committed snapshot, and then repeats the
requests in the journal. Meanwhile steps wait to be submitted. Callers notice nothing else. When a step has
failed, all groups stay and go back.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

from cluster.recovery.liveness_waiter import SupersededError
from cluster.recovery.logged import LoggedCopy, LoggedSnapshot, LoggedStep
from cluster.recovery.policy import FailureCounter, Recovery
from cluster.recovery.process_pool import Replacement
from cluster.recovery.report import DIED, FAILED, RecoveryReport
from cluster.recovery.requests import FROM_DISK, Requests
from cluster.recovery.saving import Saving
from cluster.recovery.snapshots import Snapshots
from cluster.tcp.connection import Connection
from mpmd.errors import GroupDiedError, RecoveryError
from mpmd.util.stopwatch import Stopwatch


class _StepFailedError(GroupDiedError):
    """A group is alive, and goes back with all others because it has failed a step."""


class Replacer:
    """Replaces groups that have died, or that move.

    Args:
      requests, snapshots, saving: what groups were asked.
      policy: when to give up.
      on_recovery: is called with a report of each recovery.

    Attributes:
      leaving: the groups whose nodes are to end, or that move: it is no failure when they die.
    """

    def __init__(
        self,
        requests: Requests,
        snapshots: Snapshots,
        saving: Saving,
        policy: Recovery,
        on_recovery: Callable[[RecoveryReport], None],
    ):
        self._requests = requests
        self._snapshots = snapshots
        self._saving = saving
        self._failures = FailureCounter(policy.max_failures)
        self._on_recovery = on_recovery
        self.leaving: set[int] = set()

    def attach(self, connections: Sequence[Connection]) -> None:
        """From now on, groups are asked over these connections, and their deaths are noted."""
        note_death, note_failure = weakref.WeakMethod(self.note_death), weakref.WeakMethod(self.note_failure)

        def on_death(error: GroupDiedError) -> None:
            if (note := note_death()) is not None:
                note(error)

        def on_failed_step(step: LoggedStep) -> None:
            if (note := note_failure()) is not None:
                note(step)

        self._requests.on_failed_step = on_failed_step
        self._requests.groups.attach(self._requests.pool.calls(connections, on_death))

    def note_death(self, error: GroupDiedError) -> None:
        """A group counts as dead. Is called in any thread."""
        requests = self._requests
        with requests.changed:
            before = requests.dead.get(error.mpmd_idx)
            if requests.error is None and (before is None or isinstance(before, _StepFailedError)):
                step = requests.journal.current_step(error.mpmd_idx)
                self._begin(error, step, DIED)

    def note_failure(self, step: LoggedStep) -> None:
        """A step has failed that has taken its inputs over. No group counts as dead, or nothing is done."""
        reason = f"{step} failed, and all groups go back to before it"
        self._begin(_StepFailedError(reason, min(step.groups)), step, FAILED)

    def _begin(self, error: GroupDiedError, step: LoggedStep | None, kind: str) -> None:
        """Has a thread recover from a failure, or the thread that already does take it into account."""
        requests = self._requests
        is_first = not requests.dead
        requests.dead[error.mpmd_idx] = error
        if is_first:
            requests.journal.suspend()
            requests.changed.notify_all()
            replace = functools.partial(self.replace, error, step, kind)
            threading.Thread(target=replace, name="mpmd recovery", daemon=True).start()

    def replace(
        self,
        death: GroupDiedError,
        step: LoggedStep | None = None,
        kind: str = DIED,
        watch: Stopwatch | None = None,
    ) -> None:
        """Has the pool replace what is dead or to move, and asks again what was asked.

        Blocks until then; no thread waits for this one with the lock held.

        Args:
          death: the first one.
          step: what its group was running.
          kind: as of ``RecoveryReport``.
          watch: has the earlier phases, and gets those of this.
        """
        requests, watch = self._requests, watch or Stopwatch()
        try:
            dead, connections, lost = self._replace_processes(death, step, watch)
        except SupersededError:
            requests.pool.release()  # the mesh was closed, perhaps before the last process was started
            return
        except BaseException as error:  # whatever it is, those who wait have to know
            with requests.changed:
                fatal = error if isinstance(error, RecoveryError) else _unrecoverable(death, str(error))
                requests.give_up(fatal, error.__cause__ or error)
            return
        with requests.changed:
            if requests.error is not None:
                for connection in connections:
                    connection.close()
                return
            self.attach(connections)
            requests.dead.clear()
            if lost is not None:
                requests.lose_values(death, lost)
            steps = self._ask_again()
            with watch("replayed"):
                attempt = requests.journal.attempt
                requests.wait_for_end_of(attempt, lambda: all(map(requests.journal.is_answered, steps)))
        report = RecoveryReport(
            mpmd_idxs=tuple(sorted(dead)),
            reason=str(death),
            step=step.ordinal if step else None,
            num_replayed=sum(replayed.failure is None for replayed in steps),
            seconds=watch.seconds,
            lost=lost,
            kind=kind,
            shares_with={
                process.mpmd_idx: process.shares_with
                for process in requests.pool.infos
                if process.mpmd_idx in dead and process.shares_with is not None
            },
        )
        self._on_recovery(report)
        print(f"cluster: {report}", file=sys.stderr, flush=True)
        requests.pool.replacements.start_spares()

    def _replace_processes(
        self, death: GroupDiedError, step: LoggedStep | None, watch: Stopwatch
    ) -> Replacement:
        requests = self._requests

        def count_failure(failure: Exception | None) -> None:
            if reason := self._failures.count(death.mpmd_idx, None if failure else step):
                last = f"; the last time because {failure}" if failure else ""
                raise _unrecoverable(death, f"{reason}{last}") from (failure or death)

        requests.groups.detach(death)
        with requests.changed:
            dead = {i for i, error in requests.dead.items() if not isinstance(error, _StepFailedError)}
        is_failure = bool(dead - self.leaving)
        self.leaving -= dead
        if is_failure:
            count_failure(None)
        return requests.pool.replace_all(
            dead, requests.loads, requests.journal.committed, watch, count_failure
        )

    def _ask_again(self) -> list[LoggedStep]:
        """Asks all that the journal has. Returns the steps."""
        entries = self._requests.journal.go_back()
        for entry in entries:
            if isinstance(entry, LoggedSnapshot):
                self._snapshots.ask(entry)
            elif isinstance(entry, LoggedCopy):
                self._saving.copy_again(entry)
            else:
                self._requests.ask(entry)
        self._requests.changed.notify_all()
        return [entry for entry in entries if isinstance(entry, LoggedStep)]


def _unrecoverable(death: GroupDiedError, reason: str) -> RecoveryError:
    return RecoveryError(f"{death}. The groups do not recover: {reason}. {FROM_DISK}", death.mpmd_idx)
