"""The idle time of each group, divided among its causes.

A group is idle before a task ``t``, from the end of ``p``, its task before. The last message that it waited
for was sent by ``u``::

    [end of p ......... end of u][ message in flight ][ handling ]

1. Behind the end of ``u``, the time is message and handling as the links say. Without a ``u``, all of it is.
2. Of the time until the end of ``u``, ``fill`` is at most the time that the ideal schedule has before ``t``.
3. The rest is divided in proportion to the positive differences of the accounts of ``u`` and ``p``. What has
   delayed both cancels out, however long ago it was; so a delay that travels through all groups keeps its
   name.
4. ``elsewhere`` is what is left: idle time that the ideal schedule has before other tasks. It is at most the
   difference of ``work`` less the time before ``t`` in the ideal.

A group that began late, and waited for no message then, has lost the time after its ideal start alone. The
gap after a group's last task waits for the group that replies last; from that reply to the return it is the
driver's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from mpmd.attribution.accounts import Account
from mpmd.attribution.ideal import Ideal
from mpmd.attribution.links import Links
from mpmd.attribution.measured import Measured


class Causes(NamedTuple):
    """Nanoseconds of idle time by cause; their sum is the idle time.

    Attributes:
      fill: the ideal schedule is idle here, too.
      imbalance: stages that take longer than the mean of their loop.
      jitter: tasks that took longer than the median of their type.
      message: messages in flight, from when the sender turned to them until they had come.
      handling: a group's own time between tasks.
      outside: work outside the loops that takes longer than its share.
      late_begin: from when a group had the driver's request until it had the step's arguments.
      driver: from the driver's call until a group had the request, and from the last reply to the return.
      elsewhere: idle time that the ideal schedule has before other tasks.
    """

    fill: int = 0
    imbalance: int = 0
    jitter: int = 0
    message: int = 0
    handling: int = 0
    outside: int = 0
    late_begin: int = 0
    driver: int = 0
    elsewhere: int = 0

    def plus(self, other: Causes) -> Causes:
        """The sum, cause by cause."""
        return Causes(*map(int.__add__, self, other))


SHARED = ("imbalance", "jitter", "message", "handling", "outside", "late_begin", "driver")
"""The causes that accounts have, in the order in which equal shares are rounded."""


class Culprit(NamedTuple):
    """An operation that has much of a cause, and the nanoseconds of the gap that are of this cause."""

    operation: int
    cause: str
    nanoseconds: int


@dataclasses.dataclass(frozen=True)
class Gap:
    """A span in which a group runs no task, in nanoseconds since the call.

    Attributes:
      before: the task before it, as an operation's number; -1 at the begin of the step.
      after: the task after it; -1 at the end of the step.
      waited: the operation that was waited for; -1 for none.
      message: the number of the last message that was waited for; -1 for none.
      causes: their sum is ``end - start``.
      culprits: the operation to blame for each of the larger causes, the largest first.
      most_elsewhere: the most that ``causes.elsewhere`` may be.
    """

    group: int
    start: int
    end: int
    before: int
    after: int
    waited: int
    message: int
    causes: Causes
    culprits: tuple[Culprit, ...]
    most_elsewhere: int


def gaps_of(
    measured: Measured,
    ideal: Ideal,
    links: Links,
    entries: tuple[Account, ...],
    accounts: tuple[Account, ...],
) -> tuple[Gap, ...]:
    """All gaps, by group and start; those of a group and its tasks fill the step."""
    divider = _Divider(measured, ideal, links, entries, accounts)
    return tuple(gap for group in measured.groups for gap in divider.gaps(group))


@dataclasses.dataclass(frozen=True)
class _Divider:
    measured: Measured
    ideal: Ideal
    links: Links
    entries: tuple[Account, ...]
    accounts: tuple[Account, ...]

    def gaps(self, group: int) -> Iterator[Gap]:
        measured, before, idle_since = self.measured, -1, 0
        for task in measured.tasks(group):
            if measured.starts[task] > idle_since:
                yield self._before_task(group, task, before, idle_since)
            before, idle_since = task, measured.ends[task]
        if measured.returned > idle_since:
            yield self._at_end(group, before, idle_since)

    def _before_task(self, group: int, task: int, before: int, start: int) -> Gap:
        at, link = task, self.links[task]
        message, handling, number = link.message, link.handling, link.message_number
        while not link.is_after_sender and link.parent != before:  # across what is no task
            at = link.parent
            link = self.links[at]
            message, handling = message + link.message, handling + link.handling
            number = link.message_number if number < 0 else number
        ideal_idle = self.ideal.starts[task] - self._ideal_end(before)
        waited, most = -1, 0
        culprits: tuple[Culprit, ...] = ()
        if link.is_after_sender:
            waited = link.parent
            causes, culprits, most = self._divided(before, waited, start, link.start, ideal_idle)
        elif link.parent < 0:
            received = self.measured.received[group]
            causes = _late(min(received, link.start), link.start, ideal_idle)
        else:
            causes = Causes()
        causes = causes.plus(Causes(message=message, handling=handling))
        named = {"message": message, "handling": handling}
        if waited < 0:
            named |= {"driver": causes.driver, "late_begin": causes.late_begin}
        own_causes = [Culprit(task, cause, time) for cause, time in named.items() if time > 0]
        ordered = sorted([*culprits, *own_causes], key=lambda culprit: -culprit.nanoseconds)
        return Gap(
            group,
            start,
            self.measured.starts[task],
            before,
            task,
            waited,
            number,
            causes,
            tuple(ordered),
            most,
        )

    def _at_end(self, group: int, before: int, start: int) -> Gap:
        measured = self.measured
        last = max(map(measured.final, measured.groups), key=measured.ends.__getitem__)
        replied = measured.ends[last]
        ideal_idle = self.ideal.makespan - self._ideal_end(before)
        causes, culprits, most = self._divided(before, last, start, replied, ideal_idle)
        causes = causes.plus(Causes(driver=measured.returned - replied))
        return Gap(group, start, measured.returned, before, -1, last, -1, causes, culprits, most)

    def _ideal_end(self, operation: int) -> int:
        return self.ideal.ends[operation] if operation >= 0 else 0

    def _divided(
        self, before: int, waited: int, start: int, end: int, ideal_idle: int
    ) -> tuple[Causes, tuple[Culprit, ...], int]:
        """Divides the time from ``start`` to ``end``, when ``waited`` ended.

        Returns: the causes, their culprit, and the most that may be ``elsewhere``.
        """
        fill = min(end - start, max(ideal_idle, 0))
        rest = end - start - fill
        if rest == 0:
            return Causes(fill=fill), (), 0
        of_before = self.accounts[before] if before >= 0 else Account()
        differences = self.accounts[waited].minus(of_before)
        # By clocks that are wrong, a message can be taken in before its sender had ended.
        differences = differences._replace(message=differences.message + end - self.measured.ends[waited])
        positive = {cause: amount for cause in SHARED if (amount := getattr(differences, cause)) > 0}
        offered = sum(positive.values())
        shares, elsewhere = positive, rest - offered
        if offered > rest:
            shares, elsewhere = {cause: rest * time // offered for cause, time in positive.items()}, 0
            shares[max(positive, key=positive.__getitem__)] += rest - sum(shares.values())
        culprits: tuple[Culprit, ...] = ()
        if shares:
            cause = max(shares, key=shares.__getitem__)
            if (operation := self._culprit(waited, before, cause)) >= 0:
                culprits = (Culprit(operation, cause, shares[cause]),)
        most = max(differences.work - ideal_idle, 0) if elsewhere else 0
        return Causes(fill=fill, elsewhere=elsewhere, **shares), culprits, most

    def _culprit(self, waited: int, before: int, cause: str) -> int:
        """The operation with the most of a cause on the way back to an ancestor of both."""
        most, culprit = 0, -1
        for _ in range(_FOLLOWED):
            if waited < 0 or waited == before:
                break
            if before >= 0 and self.measured.ends[before] > self.measured.ends[waited]:
                before = self.links[before].parent
                continue
            amount = getattr(self.entries[waited], cause)
            if amount > most:
                most, culprit = amount, waited
            waited = self.links[waited].parent
        return culprit


_FOLLOWED = 200
"""The links along which a culprit is searched."""


def _late(received: int, began: int, ideal_idle: int) -> Causes:
    """The causes of the time until a group began, which would have begun after ``ideal_idle`` at best."""
    fill = min(max(ideal_idle, 0), began)
    driver = max(received - fill, 0)
    return Causes(fill=fill, driver=driver, late_begin=began - fill - driver)
