"""Decides which groups have died, and which steps are late, by signs of their processes. Knows no Ray.

A group is dead with the first of its processes, and its remaining processes are ended.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from cluster.driver.calls.pending_calls import PendingCalls, PendingStep
from cluster.protocol.endpoint import Endpoint
from mpmd.errors import GroupDiedError, GroupStuckError, StepTimeoutError
from mpmd.runtime.activity import ActivityKind, Doing

PING_SECONDS = 10.0

UNRESPONSIVE_SECONDS = 60.0

DEATH_REPORT_SECONDS = 5.0
"""The seconds that Ray, which knows the reason, has to report a death once the connection has ended."""

_DOUBT_SECONDS = 1.0
"""Seconds that a loss which peers have noticed waits after ``DEATH_REPORT_SECONDS`` for a better reason."""

DIVIDED_SECONDS = 60.0
"""The seconds that processes of a group have to leave a failed step, once the first of the group has left."""

ANSWER_SECONDS = 1.0
"""The seconds that processes have to report their activity before a late step is ended."""

LEAVE_SECONDS = 10.0
"""The seconds after the end of a step in which its groups have to leave it."""

_LEAST_INTERVAL = 0.5


@dataclasses.dataclass(frozen=True)
class TimeLimits:
    """The user's limits of time in seconds, as ``launch`` documents them; ``None`` is without limit."""

    step_timeout: float | None = None
    stuck_after: float | None = None
    load_timeout: float | None = None

    def exceeded(self, doing: Doing) -> str | None:
        match doing.kind:
            case ActivityKind.TASK:
                limit, text = self.stuck_after, "one task for longer than stuck_after"
            case ActivityKind.LOAD:
                limit, text = self.load_timeout, "one part of loading for longer than load_timeout"
            case _:
                return None
        return None if limit is None or doing.seconds < limit else f"it is in {text}={limit:g} s"

    def exclude(self, doing: Doing) -> bool:
        """Whether a process exceeds a limit, whoever watches its steps."""
        return self.exceeded(doing) is not None or (
            doing.kind is ActivityKind.TASK
            and self.step_timeout is not None
            and doing.seconds >= self.step_timeout + LEAVE_SECONDS
        )


NO_LIMITS = TimeLimits()


@dataclasses.dataclass
class _DeathCause:
    """A cause of death that counts from a time on, unless Ray has a better reason before."""

    due: float
    message: str
    is_reported: bool = False


class Liveness:
    """Joins the signs of life of processes: ends of their connections, answers to pings, their activity.

    All times are seconds of one monotonic clock. Used by one thread, except for ``mark_answered`` and
    ``doing``, which may be called from any thread.

    Args:
      processes: all processes, in the order of their numbers, by which the methods name them.
      limits: how long steps and tasks may take.
      pending: the calls whose replies are awaited.
      locations: where each process runs, for messages to users.
    """

    def __init__(
        self,
        processes: Sequence[Endpoint],
        limits: TimeLimits,
        pending: PendingCalls,
        locations: Sequence[str] = (),
    ):
        self._processes = processes
        self._limits = limits
        self._pending = pending
        self._locations = locations
        self._disconnections: dict[int, _DeathCause] = {}
        self._breaks: dict[int, _DeathCause] = {}
        self._unanswered: dict[int, float] = {}  # when the process was pinged
        self._reports: dict[int, tuple[Doing, float]] = {}  # and when it came
        self._stuck: set[int] = set()  # the processes that were found so
        self._steps: list[PendingStep] = []  # whose time has begun
        self._next_ping = 0.0
        self._asked = 0.0

    # Signs of life.

    def mark_disconnected(self, number: int, cause: str, now: float) -> None:
        """The process's connection has ended; the first non-empty ``cause`` is kept. May be repeated."""
        message = f"{self._processes[number].name} is gone: its connection to the driver has ended"
        loss = self._disconnections.setdefault(number, _DeathCause(now + DEATH_REPORT_SECONDS, message))
        if loss.message == message:
            loss.message += cause

    def disconnected_first(self, number: int) -> bool:
        mpmd_idx = self._processes[number].mpmd_idx
        lost = [i for i in self._disconnections if self._processes[i].mpmd_idx == mpmd_idx]
        return not lost or lost[0] == number

    def mark_broken(self, number: int, error: str, now: float) -> None:
        process = self._processes[number]
        message = (
            f"group {process.mpmd_idx} has failed as a whole: its processes have lost one another; "
            f"process {process.rank} reports: {error}"
        )
        self._breaks.setdefault(number, _DeathCause(now + DEATH_REPORT_SECONDS + _DOUBT_SECONDS, message))

    def mark_answered(self, number: int, doing: Doing | None, now: float) -> None:
        """The process has answered its ping; without an activity if it has died, which other calls report."""
        self._unanswered.pop(number, None)
        if doing is not None:
            self._reports[number] = doing, now

    def pings(self, now: float) -> list[int]:
        is_due = now >= self._next_ping and self._pending.are_awaited
        if not is_due and not self._limits_are_due(now):
            return []
        self._next_ping, self._asked = now + PING_SECONDS, now
        answered = [i for i in range(len(self._processes)) if i not in self._unanswered]
        self._unanswered.update(dict.fromkeys(answered, now))
        return answered

    def _limits_are_due(self, now: float) -> bool:
        if now - self._asked < _LEAST_INTERVAL:
            return False
        limits = (
            self._limits.stuck_after if self._steps else None,
            self._limits.load_timeout if self._pending.are_awaited else None,
        )
        timeout = math.inf if self._limits.step_timeout is None else self._limits.step_timeout
        is_due = any(limit is not None and now - self._asked >= limit / 4 for limit in limits)
        return is_due or any(self._asked < step.since + timeout <= now for step in self._steps)

    def doing(self, number: int, now: float) -> str:
        if number not in self._reports:
            return "has not said yet what it is doing"
        doing, when = self._reports[number]
        return f"{doing}" + (f", {now - when:.0f} s ago" if now - when >= 2 * ANSWER_SECONDS else "")

    # What follows.

    def late_steps(self, now: float) -> list[tuple[int, StepTimeoutError]]:
        """The runs of steps to end now, and the reasons; said once.

        The time of a step begins when each of its groups has answered all steps before.
        """
        timeout = self._limits.step_timeout
        late = []
        self._steps = self._pending.oldest_steps
        for step in self._steps:
            step.since = min(step.since, now)
            if timeout is None or step.ended is not None or now < step.since + timeout + ANSWER_SECONDS:
                continue
            step.ended = now
            message = f"{self._late(step)}, and was ended. {self._describe('its', now)}"
            late.append((step.run, StepTimeoutError(message)))
        return late

    def deaths(self, now: float) -> Iterator[GroupDiedError]:
        """The groups that count as dead now, one by one: a death may be the reason of the next."""
        yield from self._lost(now)
        yield from self._divided(now)
        yield from self._unresponsive(now)
        yield from self._remaining(now)
        yield from self._stuck_groups(now)

    def _lost(self, now: float) -> Iterator[GroupDiedError]:
        """The deaths that Ray has had the time to report; each is returned once."""
        for number, loss in (*self._disconnections.items(), *self._breaks.items()):
            if not loss.is_reported and now >= loss.due:
                loss.is_reported = True
                yield GroupDiedError(loss.message + self._location(number), self._processes[number].mpmd_idx)

    def _location(self, number: int) -> str:
        return f" ({self._locations[number]})" if self._locations else ""

    def _divided(self, now: float) -> Iterator[GroupDiedError]:
        for step in self._pending.failed_steps:
            step.failed = min(step.failed, now)
            if step.is_divided or now - step.failed < DIVIDED_SECONDS:
                continue
            step.is_divided = True
            for mpmd_idx in self._pending.half_answered(step.run):
                yield GroupDiedError(
                    f"group {mpmd_idx} has failed as a whole: a process has not left a failed step for "
                    f"{DIVIDED_SECONDS:g} s, and another one has. The step has failed because {step.failure}",
                    mpmd_idx,
                )

    def _unresponsive(self, now: float) -> Iterator[GroupDiedError]:
        for number, since in list(self._unanswered.items()):
            if now - since >= UNRESPONSIVE_SECONDS and self._pending.are_awaited:
                self._unanswered.pop(number, None)
                silent = f"its process has not answered for {now - since:.0f} s{self._location(number)}"
                process = self._processes[number]
                yield GroupDiedError(f"{process.name} is stuck: {silent}", process.mpmd_idx)

    def _remaining(self, now: float) -> Iterator[GroupStuckError]:
        for step in self._steps:
            if step.ended is not None and now - step.ended >= LEAVE_SECONDS:
                for process in self._pending.running(step.run):
                    yield self._stuck_error(
                        process,
                        f"{self._late(step)}, was ended, and has not been left for {now - step.ended:.0f} s",
                        now,
                    )

    def _stuck_groups(self, now: float) -> Iterator[GroupStuckError]:
        for number, (doing, _) in list(self._reports.items()):
            exceeded = self._limits.exceeded(doing)
            if exceeded is not None and number not in self._stuck:
                self._stuck.add(number)
                yield self._stuck_error(self._processes[number], exceeded, now)

    def _late(self, step: PendingStep) -> str:
        return f"step {step.ordinal} has taken longer than step_timeout={self._limits.step_timeout:g} s"

    def _stuck_error(self, process: Endpoint, why: str, now: float) -> GroupStuckError:
        message = f"{process.name} is stuck: {why}. {self._describe('the', now)}"
        return GroupStuckError(message, process.mpmd_idx)

    def _describe(self, whose: str, now: float) -> str:
        lines = (f"  {process.name}: {self.doing(i, now)}" for i, process in enumerate(self._processes))
        return "\n".join([f"What {whose} processes were doing:", *lines])
