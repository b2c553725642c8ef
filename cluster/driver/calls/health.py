"""Decides which groups have died, by signs of their processes. Knows neither Ray nor the clock.

A group is dead with the first of its processes, and its remaining processes are ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cluster.protocol.endpoint import Endpoint
from mpmd.errors import GroupDiedError

PING_SECONDS = 10.0
"""The seconds between two pings of processes while a reply is awaited."""

UNRESPONSIVE_SECONDS = 60.0
"""A process that leaves a ping unanswered for this long is stopped, or hangs."""

DEATH_REPORT_SECONDS = 5.0
"""The seconds that Ray, which knows the reason, has to report a death once the connection has ended."""

_DOUBT_SECONDS = 1.0
"""The seconds that a loss which peers have noticed waits longer than that for a better reason."""


@dataclasses.dataclass
class _Loss:
    """A cause of death that counts from a time on, unless Ray has a better reason before."""

    due: float
    message: str
    is_reported: bool = False


class GroupHealth:
    """Decides when a group counts as dead: with the first of its processes.

    All times are seconds of one monotonic clock. Used by one thread, except for ``mark_answered``, which may
    be called from any thread.

    Args:
      processes: all processes, in the order of their numbers, by which the methods name them.
      locations: where each process runs, for messages to users.
    """

    def __init__(self, processes: Sequence[Endpoint], locations: Sequence[str] = ()):
        self._processes = processes
        self._locations = locations
        self._disconnections: dict[int, _Loss] = {}
        self._breaks: dict[int, _Loss] = {}
        self._unanswered: dict[int, float] = {}  # when the process was pinged
        self._next_ping = 0.0

    def mark_disconnected(self, number: int, cause: str, now: float) -> None:
        """The process's connection has ended; the first non-empty ``cause`` is kept. May be repeated."""
        message = f"{self._processes[number].name} is gone: its connection to the driver has ended"
        loss = self._disconnections.setdefault(number, _Loss(now + DEATH_REPORT_SECONDS, message))
        if loss.message == message:
            loss.message += cause

    def mark_broken(self, number: int, error: str, now: float) -> None:
        """A process has lost its group's other processes, most likely because some process has died."""
        process = self._processes[number]
        message = (
            f"group {process.mpmd_idx} has failed as a whole: its processes have lost one another; "
            f"process {process.rank} reports: {error}"
        )
        self._breaks.setdefault(number, _Loss(now + DEATH_REPORT_SECONDS + _DOUBT_SECONDS, message))

    def take_dead(self, now: float) -> list[GroupDiedError]:
        """The deaths that Ray has had the time to report; each is returned once."""
        errors = []
        for number, loss in (*self._disconnections.items(), *self._breaks.items()):
            if not loss.is_reported and now >= loss.due:
                loss.is_reported = True
                message = loss.message + self._location(number)
                errors.append(GroupDiedError(message, self._processes[number].mpmd_idx))
        return errors

    def _location(self, number: int) -> str:
        return f" ({self._locations[number]})" if self._locations else ""

    def disconnected_first(self, number: int) -> bool:
        """Whether no other process of the same group has lost its connection before this one."""
        mpmd_idx = self._processes[number].mpmd_idx
        lost = [i for i in self._disconnections if self._processes[i].mpmd_idx == mpmd_idx]
        return not lost or lost[0] == number

    def ping_is_due(self, now: float) -> bool:
        """Whether it is time for ``start_pings``."""
        return now >= self._next_ping

    def start_pings(self, now: float) -> list[int]:
        """Begins an interval. Returns the processes to ping: all that have answered every ping so far."""
        self._next_ping = now + PING_SECONDS
        answered = [i for i in range(len(self._processes)) if i not in self._unanswered]
        self._unanswered.update(dict.fromkeys(answered, now))
        return answered

    def mark_answered(self, number: int) -> None:
        """The process has answered its ping."""
        self._unanswered.pop(number, None)

    def unresponsive(self, now: float) -> list[GroupDiedError]:
        """The groups of which a process has left a ping unanswered for too long."""
        return [
            GroupDiedError(
                f"{self._processes[number].name} is stuck: "
                f"its process has not answered for {now - since:.0f} s{self._location(number)}",
                self._processes[number].mpmd_idx,
            )
            for number, since in list(self._unanswered.items())
            if now - since >= UNRESPONSIVE_SECONDS
        ]
