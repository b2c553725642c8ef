"""Finds steps, tasks and parts of loading that take too long. Has no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from cluster.protocol.endpoint import Endpoint
from mpmd.errors import GroupStuckError, StepTimeoutError
from mpmd.runtime.activity import Doing, Kind

ANSWER_SECONDS = 1.0
"""The seconds that processes have to report their activity before a late step is ended."""

LEAVE_SECONDS = 10.0
"""The seconds after the end of a step in which its groups have to leave it."""

_LEAST_INTERVAL = 0.5
"""Seconds between two questions to the same process, at least."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The user's limits of time; ``None`` is without limit.

    Attributes:
      step_timeout: seconds from the end of the steps before it to the answer of all groups.
      stuck_after: seconds that a process may be in one task of a step.
      load_timeout: seconds that a process may compile one executable, or do another part of loading.
    """

    step_timeout: float | None = None
    stuck_after: float | None = None
    load_timeout: float | None = None

    def exceeded(self, doing: Doing) -> str | None:
        """The limit that a process with the activity ``doing`` exceeds, as text; ``None`` without one."""
        if doing.kind is Kind.TASK and self.stuck_after is not None and doing.seconds >= self.stuck_after:
            return f"it is in one task for longer than stuck_after={self.stuck_after:g} s"
        if doing.kind is Kind.LOAD and self.load_timeout is not None and doing.seconds >= self.load_timeout:
            return f"it is in one part of loading for longer than load_timeout={self.load_timeout:g} s"
        return None

    def exclude(self, doing: Doing) -> bool:
        """Whether a process exceeds a limit, whoever watches its steps."""
        return self.exceeded(doing) is not None or (
            doing.kind is Kind.TASK
            and self.step_timeout is not None
            and doing.seconds >= self.step_timeout + LEAVE_SECONDS
        )


NO_LIMITS = Limits()


@dataclasses.dataclass
class _TimedStep:
    """A step, since when it is timed, and when it was ended because it was late.

    Attributes:
      ordinal: the number of the step to people.
    """

    ordinal: int
    since: float
    ended: float | None = None


class Watchdog:
    """Finds what takes longer than the limits.

    All times are seconds of one monotonic clock. Used by one thread, except for ``report`` and ``doing``,
    which may be called from any thread.

    Args:
      processes: all processes, in the order of their numbers, by which the methods name them.
      limits: of the user.
    """

    def __init__(self, processes: Sequence[Endpoint], limits: Limits):
        self._processes = processes
        self._limits = limits
        self._reports: dict[int, tuple[Doing, float]] = {}  # and when it came
        self._stuck: set[int] = set()  # the processes that were found so
        self._asked = 0.0
        self._steps: dict[int, _TimedStep] = {}  # those whose time has begun

    def report(self, number: int, doing: Doing, now: float) -> None:
        """Records the activity that a process has reported."""
        self._reports[number] = doing, now

    def doing(self, number: int, now: float) -> str:
        """The last reported activity of a process."""
        if number not in self._reports:
            return "has not said yet what it is doing"
        doing, when = self._reports[number]
        return f"{doing}" + (f", {now - when:.0f} s ago" if now - when >= 2 * ANSWER_SECONDS else "")

    def observe(self, oldest_steps: Mapping[int, int], now: float) -> None:
        """Begins to time the steps that are not answered and wait for no other step.

        Args:
          oldest_steps: the number of each step to people, by the number of its run.
        """
        self._steps = {
            run: self._steps.get(run) or _TimedStep(ordinal, now) for run, ordinal in oldest_steps.items()
        }

    def asks(self, now: float, is_awaited: bool) -> bool:
        """Whether to ask all processes for their activity now.

        Args:
          is_awaited: whether any reply is awaited, of a step or of another call.
        """
        if now - self._asked < _LEAST_INTERVAL:
            return False
        limits = (
            self._limits.stuck_after if self._steps else None,
            self._limits.load_timeout if is_awaited else None,
        )
        due = any(limit is not None and now - self._asked >= limit / 4 for limit in limits)
        if due or any(self._asked < step.since + timeout <= now for step, timeout in self._limited()):
            self._asked = now
            return True
        return False

    def _limited(self) -> list[tuple[_TimedStep, float]]:
        """The steps, each with the seconds that it may take, if these are limited."""
        timeout = self._limits.step_timeout
        return [] if timeout is None else [(step, timeout) for step in self._steps.values()]

    def late_steps(self, now: float) -> list[tuple[int, StepTimeoutError]]:
        """The steps to end now, and the reasons; said once."""
        timeout = self._limits.step_timeout
        if timeout is None:
            return []
        late = [
            (number, step)
            for number, step in self._steps.items()
            if step.ended is None and now >= step.since + timeout + ANSWER_SECONDS
        ]
        for _, step in late:
            step.ended = now
        return [
            (
                number,
                StepTimeoutError(
                    f"step {step.ordinal} has taken longer than step_timeout={timeout:g} s, and was ended. "
                    f"What its processes were doing:\n{self.describe(now)}"
                ),
            )
            for number, step in late
        ]

    def remaining(self, running: Callable[[int], Iterable[Endpoint]], now: float) -> list[GroupStuckError]:
        """The groups that have not left a step that was ended.

        Args:
          running: gives the processes that have not answered a step.
        """
        return [
            GroupStuckError(
                f"{process.name} is stuck: step {step.ordinal} has taken longer than "
                f"step_timeout={self._limits.step_timeout:g} s, was ended, and has not been left for "
                f"{now - step.ended:.0f} s. What the processes were doing:\n{self.describe(now)}",
                process.mpmd_idx,
            )
            for number, step in self._steps.items()
            if step.ended is not None and now - step.ended >= LEAVE_SECONDS
            for process in running(number)
        ]

    def stuck(self, now: float) -> list[GroupStuckError]:
        """The groups of which a process exceeds a limit; each process is returned once."""
        errors = []
        for number, (doing, _) in list(self._reports.items()):
            exceeded = self._limits.exceeded(doing)
            if exceeded is not None and number not in self._stuck:
                self._stuck.add(number)
                process = self._processes[number]
                message = (
                    f"{process.name} is stuck: {exceeded}. "
                    f"What the processes were doing:\n{self.describe(now)}"
                )
                errors.append(GroupStuckError(message, process.mpmd_idx))
        return errors

    def describe(self, now: float) -> str:
        """A line for each process."""
        return "\n".join(
            f"  {process.name}: {self.doing(number, now)}" for number, process in enumerate(self._processes)
        )
