"""A runtime that outlives the death of its groups.

When a group has died, a thread replaces it, has all groups go back to the last committed snapshot, and asks
again what the journal has. Meanwhile steps wait to be submitted. Callers notice nothing else.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence

from ray.actor import ActorHandle

from cluster.actor_calls import ActorCalls
from cluster.connection import Connection
from cluster.driver import RayRuntime
from cluster.fleet import Fleet
from cluster.journaled_runtime import FROM_DISK
from cluster.recovery import DIED, FailureCounter, Recovery, RecoveryReport
from cluster.storing_runtime import StoringRuntime
from cluster.waits import SupersededError
from cluster.watchdog import Limits
from mpmd.errors import GroupDiedError, RecoveryError
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.runtime.journal import LoggedStep
from mpmd.stopwatch import Stopwatch


class RecoveringRuntime(StoringRuntime):
    """Replaces groups when they die.

    Args:
      fleet, connections, limits, runtime_of, max_in_flight: as of ``JournaledRuntime``.
      recovery: when to copy values, and when to give up.
      on_recovery: is called with a report of each recovery.
    """

    def __init__(
        self,
        fleet: Fleet,
        connections: Sequence[Connection],
        limits: Limits,
        runtime_of: Callable[[ActorCalls], RayRuntime],
        recovery: Recovery,
        on_recovery: Callable[[RecoveryReport], None],
        max_in_flight: int = MAX_IN_FLIGHT,
    ):
        self._on_recovery = on_recovery
        self._failures = FailureCounter(recovery.max_failures)
        super().__init__(fleet, connections, limits, runtime_of, recovery, max_in_flight)

    @property
    def actors(self) -> tuple[ActorHandle, ...]:
        """The actors: group by group, those of its processes."""
        return tuple(self._fleet.actors)

    @property
    def is_recovering(self) -> bool:
        """Whether groups are being replaced."""
        return bool(self._dead)

    @property
    def logged_bytes(self) -> int:
        """The host arrays of the steps that would be run again."""
        return self._journal.nbytes

    @property
    def is_copying(self) -> bool:
        """Whether a snapshot is under way."""
        return self._journal.snapshot is not None

    def _note_death(self, error: GroupDiedError) -> None:
        with self._changed:
            if self._error is not None or error.mpmd_idx in self._dead:
                return
            is_first = not self._dead
            step = self._journal.current_step(error.mpmd_idx)
            self._dead[error.mpmd_idx] = error
            if is_first:
                self._journal.suspend()
                self._changed.notify_all()
                work = functools.partial(self._recover, error, step)
                threading.Thread(target=work, name="mpmd recovery", daemon=True).start()

    def _is_failure(self, mpmd_idx: int) -> bool:
        """Whether a group's death, which is asked about once, counts in ``max_failures``."""
        return True

    def _recover(
        self,
        death: GroupDiedError,
        step: LoggedStep | None,
        kind: str = DIED,
        watch: Stopwatch | None = None,
    ) -> None:
        """Has the fleet replace what is dead or to move, ``kind`` says which, and asks again what was asked.

        Blocks until then; no thread waits for this one with the lock held.
        """
        watch = watch or Stopwatch()

        def count_failure(failure: Exception | None) -> None:
            if reason := self._failures.count(death.mpmd_idx, None if failure else step):
                last = f"; the last time because {failure}" if failure else ""
                raise _unrecoverable(death, f"{reason}{last}") from (failure or death)

        try:
            self._groups.detach(death)
            if [mpmd_idx for mpmd_idx in list(self._dead) if self._is_failure(mpmd_idx)]:
                count_failure(None)
            dead, connections, lost = self._fleet.replace_all(
                self._dead, self._loads, self._journal.committed, watch, count_failure
            )
        except SupersededError:
            self._fleet.release()  # the mesh was closed, perhaps before the last process was started
            return
        except BaseException as error:  # whatever it is, those who wait have to know
            with self._changed:
                fatal = error if isinstance(error, RecoveryError) else _unrecoverable(death, str(error))
                self._give_up(fatal, error.__cause__ or error)
            return
        with self._changed:
            if self._error is not None:
                for connection in connections:
                    connection.close()
                return
            self._groups.attach(self._calls(connections))
            self._dead.clear()
            if lost is not None:
                self._lose_values(death, lost)
            steps = self._ask_again()
            with watch("replayed"):
                attempt = self._journal.attempt
                self._wait_for_end_of(attempt, unless=lambda: all(map(self._journal.is_answered, steps)))
        report = RecoveryReport(
            tuple(sorted(dead)),
            str(death),
            step.ordinal if step else None,
            len(steps),
            watch.seconds,
            lost,
            kind,
            {
                process.mpmd_idx: process.shares_with
                for process in self._fleet.infos
                if process.mpmd_idx in dead and process.shares_with is not None
            },
        )
        self._on_recovery(report)
        print(f"cluster: {report}", file=sys.stderr, flush=True)
        self._fleet.replacements.start_spares()


def _unrecoverable(death: GroupDiedError, reason: str) -> RecoveryError:
    return RecoveryError(f"{death}. The groups do not recover: {reason}. {FROM_DISK}", death.mpmd_idx)
