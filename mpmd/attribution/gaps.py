"""The idle time of each group, divided among its causes.

A group is idle before a task ``t``, from the end of ``p``, its task before. The last message that it waited
for was sent by ``u``::

    [end of p ......... end of u][ message in flight ][ handling ]

1. Behind the end of ``u``, the time is message and handling as the links say. Without a ``u``, all time is.
2. Of the time until the end of ``u``, ``fill`` is at most the time that the ideal schedule has before ``t``.
3. The rest is divided in proportion to the positive differences of the accounts of ``u`` and ``p``. A delay
   of both cancels out, however long ago it was; so a delay that travels through all groups keeps its name.
4. ``elsewhere`` is the remainder: idle time that the ideal schedule has before other tasks.

A group that began late, and waited for no message then, has lost only the time after its ideal start. The
gap after a group's last task waits for the group that replies last; from that reply to the return it is the
driver's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from mpmd.attribution.accounts import Account, Accounts
from mpmd.attribution.links import ParentLink


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


SHARED = ("imbalance", "jitter", "message", "handling", "outside", "late_begin", "driver")
"""The causes that accounts have, in the order in which equal shares are rounded."""


class Culprit(NamedTuple):
    """An operation that has much of a cause, and the nanoseconds of the gap that are of this cause."""

    operation: int
    cause: str
    nanoseconds: int


@dataclasses.dataclass(frozen=True)
class IdleSpan:
    """A span in which a group runs no task, in nanoseconds since the call.

    Attributes:
      before: the task before it, as an operation's number; -1 at the begin of the step.
      after: the task after it; -1 at the end of the step.
      waited: the operation that the group waited for; -1 for none.
      message: the number of the last message that the group waited for; -1 for none.
      causes: their sum is ``end - start``.
      culprits: the operation to blame for each of the larger causes, the largest first.
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


def gaps_of(accounts: Accounts) -> tuple[IdleSpan, ...]:
    """All gaps, by group and start; the gaps and tasks of a group fill the step."""
    return tuple(gap for group in accounts.measured.groups for gap in _gaps(accounts, group))


def _gaps(accounts: Accounts, group: int) -> Iterator[IdleSpan]:
    measured, before, idle_since = accounts.measured, -1, 0
    for task in measured.tasks(group):
        if measured.starts[task] > idle_since:
            yield _before_task(accounts, group, task, before, idle_since)
        before, idle_since = task, measured.end(task)
    if measured.returned > idle_since:
        yield _at_end(accounts, group, before, idle_since)


def _before_task(accounts: Accounts, group: int, task: int, before: int, start: int) -> IdleSpan:
    links, measured = accounts.links, accounts.measured
    link = links[task]
    message, handling, awaited = link.message, link.handling, link.awaited
    while not link.is_after_sender and link.parent != before:  # across operations that are no tasks
        link = links[link.parent]
        message, handling = message + link.message, handling + link.handling
        awaited = link.awaited if awaited < 0 else awaited
    ideal_idle = accounts.ideal.starts[task] - _ideal_end(accounts, before)
    waited, causes, culprits = -1, Causes(), list[Culprit]()
    if link.is_after_sender:
        waited = link.parent
        causes, culprits = _divided(accounts, before, waited, start, link.start, ideal_idle)
    elif link.parent < 0:
        causes = _late(link, ideal_idle)
        culprits = [Culprit(task, "driver", causes.driver), Culprit(task, "late_begin", causes.late_begin)]
    causes = causes._replace(message=causes.message + message, handling=causes.handling + handling)
    culprits += [Culprit(task, "message", message), Culprit(task, "handling", handling)]
    largest = sorted(culprits, key=lambda culprit: -culprit.nanoseconds)
    return IdleSpan(
        group=group,
        start=start,
        end=measured.starts[task],
        before=before,
        after=task,
        waited=waited,
        message=awaited,
        causes=causes,
        culprits=tuple(culprit for culprit in largest if culprit.nanoseconds > 0),
    )


def _at_end(accounts: Accounts, group: int, before: int, start: int) -> IdleSpan:
    measured, last = accounts.measured, accounts.measured.last_reply
    replied = measured.end(last)
    ideal_idle = accounts.ideal.makespan - _ideal_end(accounts, before)
    causes, culprits = _divided(accounts, before, last, start, replied, ideal_idle)
    causes = causes._replace(driver=causes.driver + measured.returned - replied)
    return IdleSpan(group, start, measured.returned, before, -1, last, -1, causes, tuple(culprits))


def _ideal_end(accounts: Accounts, operation: int) -> int:
    return accounts.ideal.end(operation) if operation >= 0 else 0


def _divided(
    accounts: Accounts, before: int, waited: int, start: int, end: int, ideal_idle: int
) -> tuple[Causes, list[Culprit]]:
    """Divides the time from ``start`` until ``waited`` ended; names the culprit of the largest cause."""
    fill = min(end - start, max(ideal_idle, 0))
    rest = end - start - fill
    if rest == 0:
        return Causes(fill=fill), []
    of_before = accounts.accounts[before] if before >= 0 else Account()
    differences = accounts.accounts[waited].minus(of_before)
    # By clocks that are wrong, a message can be taken in before its sender had ended.
    early = end - accounts.measured.end(waited)
    differences = differences._replace(message=differences.message + early)
    shares = {cause: amount for cause in SHARED if (amount := getattr(differences, cause)) > 0}
    offered = sum(shares.values())
    elsewhere = max(rest - offered, 0)
    if not shares:
        return Causes(fill=fill, elsewhere=elsewhere), []
    largest = max(shares, key=shares.__getitem__)
    if offered > rest:
        shares = {cause: rest * time // offered for cause, time in shares.items()}
        shares[largest] += rest - sum(shares.values())
    operation = _culprit(accounts, waited, before, largest)
    culprits = [Culprit(operation, largest, shares[largest])] if operation >= 0 else []
    return Causes(fill=fill, elsewhere=elsewhere, **shares), culprits


def _culprit(accounts: Accounts, waited: int, before: int, cause: str) -> int:
    """Returns the operation with the most of a cause on the way back to a common ancestor; -1 for none."""
    measured, most, culprit = accounts.measured, 0, -1
    for _ in range(_FOLLOWED):
        if waited < 0 or waited == before:
            break
        if before >= 0 and measured.end(before) > measured.end(waited):
            before = accounts.links[before].parent
            continue
        amount = getattr(accounts.entries[waited], cause)
        if amount > most:
            most, culprit = amount, waited
        waited = accounts.links[waited].parent
    return culprit


_FOLLOWED = 200
"""The links along which a culprit is searched."""


def _late(link: ParentLink, ideal_idle: int) -> Causes:
    """Divides the time until a group began, which would have begun after ``ideal_idle`` at best."""
    fill = min(max(ideal_idle, 0), link.start)
    driver = max(link.driver - fill, 0)
    return Causes(fill=fill, driver=driver, late_begin=link.start - fill - driver)
