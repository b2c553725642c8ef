"""Finds out which dimensions count layers, and where they are cut.

Dimensions that are one and the same are a class, found by union. A scan over layers says where the classes
of the arrays that it scans over are cut. The cuts spread along inclusions, where one dimension is a part of
another, such as a slice: a part is cut where the whole is, and a whole that is not cut yet is cut where its
parts are, and where the parts begin and end. The place of a cut is a fraction of the dimension, because
merging dimensions changes their sizes.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from jax.extend.core import Var

from mpmd.compiler.jaxprs.disjoint_sets import DisjointSets
from mpmd.compiler.jaxprs.equations import Atom, shape_of
from mpmd.ir.stack import Stack

Node = tuple[Any, int]
"""A dimension of a variable. Anything hashable may take the variable's place."""


class _Inclusion(NamedTuple):
    """A dimension ``part`` that is a range of the dimension ``whole``.

    Attributes:
      start, size: the position of the first element and the signed length of ``part``, as fractions of
        ``whole``: 1 and -1 if ``part`` is ``whole`` in reverse.
    """

    whole: Node
    part: Node
    start: Fraction
    size: Fraction

    @property
    def span(self) -> tuple[Fraction, Fraction]:
        first, last = sorted((self.start, self.start + self.size))
        return first, last

    def below(self, cuts: Iterable[Fraction]) -> set[Fraction]:
        return _inner((cut - self.start) / self.size for cut in cuts)

    def above(self, cuts: Iterable[Fraction]) -> set[Fraction]:
        """The cut points of the whole, from the cut points of the part: includes the ends of the part."""
        return _inner([*self.span, *(self.start + cut * self.size for cut in cuts)])


class LayerDimensions:
    def __init__(self) -> None:
        self._same: DisjointSets[Node] = DisjointSets()
        self._inclusions: list[_Inclusion] = []
        self._cuts: dict[Node, set[Fraction]] = {}  # by node, and once they are spread by class

    def join(self, nodes: Iterable[Node]) -> None:
        self._same.join(nodes)

    def join_all(self, pairs: Iterable[tuple[Atom | None, Atom | None]]) -> None:
        for a, b in pairs:
            if isinstance(a, Var) and isinstance(b, Var):
                for dim in range(len(shape_of(a))):
                    self.join([(a, dim), (b, dim)])

    def add_inclusion(
        self, whole: tuple[Var, int], part: tuple[Var, int], start: int, reverses: bool
    ) -> None:
        size, length = shape_of(whole[0])[whole[1]], shape_of(part[0])[part[1]]
        if length > 1:  # a single layer cannot be cut
            fractions = Fraction(start, size), Fraction(length, size)
            if reverses:
                fractions = Fraction(1), Fraction(-1)
            self._inclusions.append(_Inclusion(whole, part, *fractions))

    def cut(self, node: Node, size: int, at: Iterable[int]) -> None:
        self._cuts.setdefault(node, set()).update(_inner(Fraction(i, size) for i in at))

    def spread(self) -> None:
        """Propagates cuts along inclusions. Dimensions that are already cut keep their cuts.

        Parts of cut dimensions are cut first, then dimensions that consist entirely of cut parts, and
        last dimensions with further parts, whose cuts may not be known yet.
        """
        cuts: dict[Node, set[Fraction]] = collections.defaultdict(set)
        for node, ends in self._cuts.items():
            cuts[self._same.find(node)] |= ends
        while new := self._below(cuts) or self._above(cuts):
            cuts |= new
        self._cuts = dict(cuts)

    def _below(self, cuts: Mapping[Node, set[Fraction]]) -> dict[Node, set[Fraction]]:
        new: dict[Node, set[Fraction]] = collections.defaultdict(set)
        for part in self._inclusions:
            above, below = self._same.find(part.whole), self._same.find(part.part)
            if above in cuts and below not in cuts:
                new[below] |= part.below(cuts[above])
        return new

    def _above(self, cuts: Mapping[Node, set[Fraction]]) -> dict[Node, set[Fraction]]:
        """The cuts of uncut dimensions that have cut parts.

        If the cut parts cover some of the dimensions entirely, only the cuts of covered dimensions."""
        new: dict[Node, set[Fraction]] = collections.defaultdict(set)
        spans: dict[Node, set[tuple[Fraction, Fraction]]] = collections.defaultdict(set)
        for part in self._inclusions:
            above, below = self._same.find(part.whole), self._same.find(part.part)
            if below in cuts and above not in cuts:
                new[above] |= part.above(cuts[below])
                spans[above].add(part.span)
        complete = {node: ends for node, ends in new.items() if _is_covered(spans[node])}
        return complete or new

    def sizes(self, node: Node, size: int) -> tuple[int, ...] | None:
        """The sizes of the parts of a dimension of some size; ``None`` if it is in one part."""
        cuts = self._cuts.get(self._same.find(node))
        if not cuts or any((cut * size).denominator != 1 for cut in cuts):
            return None
        ends = [0, *sorted(int(cut * size) for cut in cuts), size]
        return tuple(stop - start for start, stop in itertools.pairwise(ends))

    def stack(self, atom: Atom) -> Stack | None:
        """The stack of a value in parts; ``None`` if it is whole, as one of which two dimensions are cut."""
        if not isinstance(atom, Var):
            return None
        shape = shape_of(atom)
        cuts = [
            Stack(dim, sizes) for dim, size in enumerate(shape) if (sizes := self.sizes((atom, dim), size))
        ]
        return cuts[0] if len(cuts) == 1 else None


def _is_covered(spans: Iterable[tuple[Fraction, Fraction]]) -> bool:
    reached = Fraction(0)
    for start, stop in sorted(spans):
        if start > reached:
            return False
        reached = max(reached, stop)
    return reached == 1


def _inner(cuts: Iterable[Fraction]) -> set[Fraction]:
    return {cut for cut in cuts if 0 < cut < 1}
