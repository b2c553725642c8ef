"""Which groups have died, from what the driver sees of them. Knows neither Ray nor the clock."""

from __future__ import annotations

import dataclasses

from mpmd.errors import GroupDiedError

PING_SECONDS = 10.0
"""How often groups are pinged while a step is pending."""

UNRESPONSIVE_SECONDS = 60.0
"""A process that leaves a ping unanswered for this long is stopped, or hangs."""

DEATH_REPORT_SECONDS = 5.0
"""How long after the end of a group's connection Ray, which knows the reason, may report the death."""


@dataclasses.dataclass
class _Disconnection:
    """The end of a group's connection: when it was noticed, why, and whether it was reported."""

    since: float
    cause: str
    is_reported: bool = False


class GroupHealth:
    """Decides when a group counts as dead. All times are seconds of one monotonic clock.

    Used by one thread, except for ``mark_answered``, which may be called from any thread.
    """

    def __init__(self, num_groups: int):
        self._num_groups = num_groups
        self._disconnections: dict[int, _Disconnection] = {}
        self._unanswered: dict[int, float] = {}  # when the group was pinged
        self._next_ping = 0.0

    def mark_disconnected(self, mpmd_idx: int, cause: str, now: float) -> None:
        """The group's connection has ended; the first non-empty ``cause`` is kept. May be repeated."""
        disconnection = self._disconnections.setdefault(mpmd_idx, _Disconnection(now, cause))
        disconnection.cause = disconnection.cause or cause

    def take_disconnected(self, now: float) -> list[GroupDiedError]:
        """The groups whose death Ray has had the time to report; each is returned once."""
        errors = []
        for mpmd_idx, disconnection in self._disconnections.items():
            if not disconnection.is_reported and now - disconnection.since >= DEATH_REPORT_SECONDS:
                disconnection.is_reported = True
                cause = disconnection.cause
                reason = f"group {mpmd_idx} is gone: its connection to the driver has ended{cause}"
                errors.append(GroupDiedError(reason, mpmd_idx))
        return errors

    def ping_is_due(self, now: float) -> bool:
        """Whether it is time for ``start_pings``."""
        return now >= self._next_ping

    def start_pings(self, now: float) -> list[int]:
        """Begins an interval. Returns the groups to ping: those that have answered every ping so far."""
        self._next_ping = now + PING_SECONDS
        answered = [i for i in range(self._num_groups) if i not in self._unanswered]
        self._unanswered.update(dict.fromkeys(answered, now))
        return answered

    def mark_answered(self, mpmd_idx: int) -> None:
        """The group has answered its ping."""
        self._unanswered.pop(mpmd_idx, None)

    def unresponsive(self, now: float) -> list[GroupDiedError]:
        """The groups that have left a ping unanswered for too long."""
        return [
            GroupDiedError(
                f"group {mpmd_idx} is stuck: its process has not answered for {now - since:.0f} s", mpmd_idx
            )
            for mpmd_idx, since in list(self._unanswered.items())
            if now - since >= UNRESPONSIVE_SECONDS
        ]
