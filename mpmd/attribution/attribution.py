"""The whole attribution of a measured step."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from mpmd.attribution.accounts import Accounts
from mpmd.attribution.gaps import Causes, IdleSpan, gaps_of
from mpmd.attribution.path import Segment, critical_path


class Attribution(Accounts):
    """The accounts of a measured step, its idle time by cause, and its critical path."""

    @functools.cached_property
    def gaps(self) -> tuple[IdleSpan, ...]:
        """The spans in which groups ran no task, by group and start."""
        return gaps_of(self)

    @functools.cached_property
    def critical_path(self) -> tuple[Segment, ...]:
        """The segments from the call to the return, without a hole."""
        return critical_path(self.measured, self.links)

    @functools.cached_property
    def by_group(self) -> tuple[Causes, ...]:
        causes: list[list[Causes]] = [[] for _ in self.measured.groups]
        for gap in self.gaps:
            causes[gap.group].append(gap.causes)
        return tuple(map(total, causes))

    @functools.cached_property
    def total(self) -> Causes:
        return total(self.by_group)


def total(parts: Iterable[Causes]) -> Causes:
    return Causes(*map(sum, zip(*parts, Causes(), strict=True)))
