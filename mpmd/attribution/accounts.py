"""The account of each operation: the parts that add up to the time of its end.

Back along the links, from an operation to the begin of a group, the time is a sum without a hole:

    end = work + imbalance + outside + jitter + message + handling + late_begin + driver

For each operation on the way, ``work`` is its time in the ideal schedule, ``imbalance`` the median of its
type less ``work`` (``outside``, for work outside the loops), and ``jitter`` its own time less the median.
Between operations, the time is ``message`` or ``handling``; before a group's first one, it is ``driver``
until the group had the request, and ``late_begin`` from then on.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Self

from mpmd.attribution.ideal import ideal_of
from mpmd.attribution.links import ParentLink, links_of, parents_first
from mpmd.attribution.measured import Measured
from mpmd.ir.plan import OutsideTask
from mpmd.simulate.workload import StepTimes


class Account(NamedTuple):
    """The parts of the time of an operation's end, in nanoseconds; their sum is that time.

    ``imbalance``, ``outside``, ``jitter`` and ``message`` may be negative.
    """

    work: int = 0
    imbalance: int = 0
    outside: int = 0
    jitter: int = 0
    message: int = 0
    handling: int = 0
    late_begin: int = 0
    driver: int = 0

    def minus(self, other: Account) -> Account:
        return Account(*map(int.__sub__, self, other))


@dataclasses.dataclass(frozen=True)
class Accounts:
    """The accounts of a measured step, with the schedule and the links that they follow from.

    Attributes:
      measured: the times by operation, message and group.
      ideal: the schedule with equal stages, free messages, and nothing between tasks.
      links: the operation that each operation really started after.
      entries: by operation, the parts that it adds to its parent's account.
      accounts: by operation, the parts of the time of its end.
    """

    measured: Measured
    ideal: StepTimes[int]
    links: tuple[ParentLink, ...]
    entries: tuple[Account, ...]
    accounts: tuple[Account, ...]

    @classmethod
    def of(cls, measured: Measured) -> Self:
        ideal, links = ideal_of(measured), links_of(measured)
        entries = tuple(
            _entry(measured, link, ideal.durations[operation], operation)
            for operation, link in enumerate(links)
        )
        accounts = [Account()] * len(entries)
        for operation in parents_first(links):
            parent, entry = links[operation].parent, entries[operation]
            accounts[operation] = entry if parent < 0 else Account(*map(int.__add__, accounts[parent], entry))
        return cls(measured, ideal, links, entries, tuple(accounts))


def _entry(measured: Measured, link: ParentLink, equal: int, operation: int) -> Account:
    median = int(measured.workload.durations[operation])
    is_outside = isinstance(measured.workload.tasks[operation], OutsideTask)
    # By clocks that are wrong, a message can be taken in before its sender had ended.
    early = 0 if link.parent < 0 else link.start - measured.end(link.parent)
    return Account(
        work=equal,
        imbalance=0 if is_outside else median - equal,
        outside=median - equal if is_outside else 0,
        jitter=measured.durations[operation] - median,
        message=link.message + early,
        handling=link.handling,
        late_begin=link.late_begin,
        driver=link.driver,
    )
