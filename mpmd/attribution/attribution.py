"""The whole attribution of a measured step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from mpmd.attribution.accounts import Account, accounts_of, entries_of
from mpmd.attribution.gaps import Causes, Gap, gaps_of
from mpmd.attribution.ideal import Ideal, ideal_of
from mpmd.attribution.links import Links, links_of
from mpmd.attribution.measured import Measured
from mpmd.attribution.path import Segment, critical_path


@dataclasses.dataclass(frozen=True)
class Attribution:
    """The idle time of a measured step by cause, and its critical path.

    Attributes:
      measured: the times by operation, message and group.
      ideal: the schedule with equal stages, free messages, and nothing between tasks.
      links: the operation that each operation really started after.
      entries: by operation, what it adds to its parent's account.
      accounts: by operation, the parts of the time of its end.
      gaps: by group and start; those of a group and its tasks fill the step.
    """

    measured: Measured
    ideal: Ideal
    links: Links
    entries: tuple[Account, ...]
    accounts: tuple[Account, ...]
    gaps: tuple[Gap, ...]

    @functools.cached_property
    def critical_path(self) -> tuple[Segment, ...]:
        """The segments from the call to the return, without a hole."""
        return critical_path(self.measured, self.links)

    @functools.cached_property
    def by_group(self) -> tuple[Causes, ...]:
        """The idle time of each group by cause."""
        gaps: list[list[Gap]] = [[] for _ in self.measured.groups]
        for gap in self.gaps:
            gaps[gap.group].append(gap)
        return tuple(total(gap.causes for gap in of_group) for of_group in gaps)

    @functools.cached_property
    def total(self) -> Causes:
        """The idle time of all groups by cause."""
        return total(self.by_group)


def total(parts: Iterable[Causes]) -> Causes:
    """The sum of causes."""
    return functools.reduce(Causes.plus, parts, Causes())


def attribute(measured: Measured) -> Attribution:
    """Divides the idle time of a measured step among its causes; linear in operations and messages."""
    ideal, links = ideal_of(measured), links_of(measured)
    entries = entries_of(measured, ideal, links)
    accounts = accounts_of(entries, links)
    return Attribution(
        measured, ideal, links, entries, accounts, gaps_of(measured, ideal, links, entries, accounts)
    )
