"""Disjoint sets, by union-find: which things are the same, from pairs that are."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class DisjointSets(Generic[T]):
    """Disjoint sets of members. Joining two members joins their sets; a new member is alone in its set.

    SciPy's ``DisjointSet`` is as fast, but the package around it takes a tenth of a second to import.
    """

    def __init__(self) -> None:
        self._above: dict[T, T] = {}

    def find(self, member: T) -> T:
        above = self._above
        while (next_above := above.setdefault(member, member)) != member:
            above[member] = above[next_above]
            member = above[next_above]
        return member

    def join(self, members: Iterable[T]) -> None:
        """Joins the sets of ``members``; the representative of the first set stands for all."""
        first: T | None = None
        for member in members:
            if first is None:
                first = self.find(member)
            else:
                self._above[self.find(member)] = first

    def representatives(self) -> dict[T, T]:
        return {member: self.find(member) for member in list(self._above)}

    def sets(self) -> list[list[T]]:
        """The sets, and the members of each, in the order in which they were first named."""
        members: dict[T, list[T]] = {}
        for member, representative in self.representatives().items():
            members.setdefault(representative, []).append(member)
        return list(members.values())
