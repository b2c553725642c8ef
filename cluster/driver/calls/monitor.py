"""Finds out which groups are dead, and which step takes too long, while replies are awaited. Knows no Ray."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from cluster.driver.calls.health import GroupHealth
from cluster.driver.calls.pending_calls import PendingCalls
from cluster.driver.calls.watchdog import Limits, Watchdog
from cluster.protocol.endpoint import Endpoint
from mpmd.errors import GroupDiedError, StepTimeoutError
from mpmd.runtime.activity import Doing

DIVIDED_SECONDS = 60.0
"""The seconds that processes of a group have to leave a failed step, once the first of the group has left."""


class Monitor:
    """Joins the signs of life of processes: the ends of their connections, pings, and their activity.

    All times are seconds of one monotonic clock.

    Args:
      processes: all processes, in the order of their numbers.
      locations: where each process runs, for messages to users.
      limits: how long steps and tasks may take.
      pending: the calls whose replies are awaited.
      clock: returns the time.
      ping: asks a process for its activity; returns ``None`` when Ray is shut down.
    """

    def __init__(
        self,
        processes: Sequence[Endpoint],
        locations: Sequence[str],
        limits: Limits,
        pending: PendingCalls,
        clock: Callable[[], float],
        ping: Callable[[int], Future[Doing] | None],
    ):
        self.health = GroupHealth(processes, locations)
        self._watchdog = Watchdog(processes, limits)
        self._pending = pending
        self._clock = clock
        self._ping_one = ping
        self._failed: dict[int, tuple[float, str]] = {}  # for steps: when it was noticed, and why

    def mark_failed(self, step: int, reason: str) -> None:
        """A step has failed, and all groups are to leave it."""
        self._failed[step] = self._clock(), reason

    def doing(self, number: int) -> str:
        """The last reported activity of a process. May be called from any thread."""
        return self._watchdog.doing(number, self._clock())

    def late_steps(self) -> list[tuple[int, StepTimeoutError]]:
        """The steps that are to be ended now, and why; said once. Call this again and again."""
        now = self._clock()
        self._watchdog.observe(self._pending.oldest_steps, now)
        if self._watchdog.asks(now, self._pending.are_awaited):
            self._ping(now)
        return self._watchdog.late_steps(now)

    def deaths(self) -> Iterator[GroupDiedError]:
        """The groups that count as dead now, one by one: a death may be the reason of the next."""
        now = self._clock()
        yield from self.health.take_dead(now)
        yield from self._divided(now)
        if self.health.ping_is_due(now) and self._pending.are_awaited:
            yield from self.health.unresponsive(now)
            self._ping(now)
        yield from self._watchdog.remaining(self._pending.running, now)
        yield from self._watchdog.stuck(now)

    def _divided(self, now: float) -> Iterator[GroupDiedError]:
        """The groups of which one process has left a failed step, and another one does not follow."""
        for step, (since, reason) in list(self._failed.items()):
            if now - since < DIVIDED_SECONDS:
                continue
            del self._failed[step]
            for mpmd_idx in self._pending.half_answered(step):
                yield GroupDiedError(
                    f"group {mpmd_idx} has failed as a whole: a process has not left a failed step for "
                    f"{DIVIDED_SECONDS:g} s, and another one has. The step has failed because {reason}",
                    mpmd_idx,
                )

    def _ping(self, now: float) -> None:
        """Asks the processes that have answered so far; an actor answers at once, whatever it computes."""
        for number in self.health.start_pings(now):
            answer = self._ping_one(number)
            if answer is not None:
                answer.add_done_callback(functools.partial(self._on_answer, number))

    def _on_answer(self, number: int, answer: Future[Doing]) -> None:
        """Called in a thread of Ray's."""
        self.health.mark_answered(number)
        if answer.exception() is None:  # otherwise the process has died, which other calls report
            self._watchdog.report(number, answer.result(), self._clock())
