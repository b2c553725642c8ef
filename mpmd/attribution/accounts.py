"""The account of each operation: what the time of its end is made of.

Back along the links, from an operation to the begin of a group, the time is a sum without a hole:

    end = work + imbalance + outside + jitter + message + handling + late_begin + driver

Of each operation on the way, ``work`` is what it takes in the ideal schedule, ``imbalance`` the median of
its type less that (``outside``, for work outside the loops), and ``jitter`` what it took less the median.
Between operations, the time is ``message`` or ``handling``; before a group's first one, it is ``driver``
until the group had the request, and ``late_begin`` from then on.
"""

from __future__ import annotations

from typing import NamedTuple

from mpmd.attribution.ideal import Ideal
from mpmd.attribution.links import Links
from mpmd.attribution.measured import Measured
from mpmd.ir.plan import OutsideTask


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

    def plus(self, other: Account) -> Account:
        """The sum of two accounts, part by part."""
        return Account(*map(int.__add__, self, other))

    def minus(self, other: Account) -> Account:
        """The difference of two accounts, part by part."""
        return Account(*map(int.__sub__, self, other))


def entries_of(measured: Measured, ideal: Ideal, links: Links) -> tuple[Account, ...]:
    """The parts that each operation adds to the account of its parent."""
    equal_times = ideal.durations
    entries = []
    for group in measured.groups:
        for operation in measured.operations(group):
            link, start = links[operation], measured.starts[operation]
            median, equal = int(measured.workload.durations[operation]), equal_times[operation]
            is_outside = isinstance(measured.workload.tasks[operation], OutsideTask)
            first = link.parent < 0
            received = min(measured.received[group], link.start)
            entries.append(
                Account(
                    work=equal,
                    imbalance=0 if is_outside else median - equal,
                    outside=median - equal if is_outside else 0,
                    jitter=measured.ends[operation] - start - median,
                    message=link.message if first else link.message + link.start - measured.ends[link.parent],
                    handling=link.handling,
                    late_begin=link.start - received if first else 0,
                    driver=received if first else 0,
                )
            )
    return tuple(entries)


def accounts_of(entries: tuple[Account, ...], links: Links) -> tuple[Account, ...]:
    """The account of each operation."""
    accounts = [Account()] * len(entries)
    for operation in links.order:
        parent, entry = links[operation].parent, entries[operation]
        accounts[operation] = entry if parent < 0 else accounts[parent].plus(entry)
    return tuple(accounts)
