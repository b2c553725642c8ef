"""Finds attention among equations: from the product of queries and keys to the product with values.

Scores are a product with batch dimensions. Their exponentials are summed, and multiplied with values in
another product with batch dimensions. Nothing between is a product without batch dimensions.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Iterable, Sequence

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.disjoint_sets import DisjointSets
from mpmd.compiler.jaxprs.equations import subjaxprs

Equations = Sequence[tuple[JaxprEqn, Collection[Hashable], Collection[Hashable]]]
"""Equations, each with the values that it reads and makes."""


class _Passed(enum.IntEnum):
    """Stations of a value since the product of queries and keys."""

    NOTHING = 0
    PRODUCT = 1
    EXPONENTIAL = 2
    SUM = 3


def attentions(equations: Equations) -> list[list[int]]:
    """The positions of the equations inside of each attention, in order, both products included.

    Equations on no path to the product with values are not among them.
    """
    inside = _followed(equations)
    last = {i for i in inside if _is_batched(equations[i][0]) and inside[i] is _Passed.SUM}
    needed: set[Hashable] = set()
    members: list[int] = []
    for i in sorted(inside, reverse=True):
        _, reads, makes = equations[i]
        if i in last or not needed.isdisjoint(makes):
            members.append(i)
            needed.update(reads)
    return _connected(equations, members[::-1], last)


def inside_attentions(equations: Equations) -> set[Hashable]:
    """The values that depend on scores of attention, up to the product with values, exclusively."""
    inside = _followed(equations)
    members = {i for of_one in attentions(equations) for i in of_one}
    firsts = {i for i in members if _is_batched(equations[i][0]) and inside[i] is not _Passed.SUM}
    values: set[Hashable] = set()
    for i, passed in inside.items():
        eqn, reads, makes = equations[i]
        is_last = _is_batched(eqn) and passed is _Passed.SUM
        if i in firsts or (not is_last and not values.isdisjoint(reads)):
            values.update(makes)
    return values


def _followed(equations: Equations) -> dict[int, _Passed]:
    """The equations that depend on a product with batch dimensions, with what their operands have passed."""
    passed: dict[Hashable, _Passed] = {}
    inside: dict[int, _Passed] = {}
    for i, (eqn, reads, makes) in enumerate(equations):
        before = max((passed.get(value, _Passed.NOTHING) for value in reads), default=_Passed.NOTHING)
        is_product = eqn.primitive.name == "dot_general"
        if _is_batched(eqn):
            inside[i] = before
            after = _Passed.NOTHING if before is _Passed.SUM else _Passed.PRODUCT
        elif is_product or before is _Passed.NOTHING:
            continue
        else:
            inside[i] = before
            after = _after(eqn, before)
        passed.update(dict.fromkeys(makes, after))
    return inside


def _after(eqn: JaxprEqn, before: _Passed) -> _Passed:
    names = set(_primitives(eqn))
    if before is _Passed.PRODUCT and names & {"exp", "exp2"}:
        before = _Passed.EXPONENTIAL
    if before is _Passed.EXPONENTIAL and "reduce_sum" in names:
        return _Passed.SUM
    return before


def _primitives(eqn: JaxprEqn) -> Iterable[str]:
    yield eqn.primitive.name
    for inner in subjaxprs(eqn):
        for member in inner.eqns:
            yield from _primitives(member)


def _is_batched(eqn: JaxprEqn) -> bool:
    """Whether it is a product with batch dimensions."""
    if eqn.primitive.name != "dot_general":
        return False
    _, (batch, _) = eqn.params["dimension_numbers"]
    return bool(batch)


def _connected(equations: Equations, members: Sequence[int], last: Collection[int]) -> list[list[int]]:
    """Positions by attention: those that pass values to one another, before the product with values."""
    same: DisjointSets[int] = DisjointSets()
    maker: dict[Hashable, int] = {}
    for i in members:
        _, reads, makes = equations[i]
        same.join([i, *(maker[value] for value in reads if value in maker)])
        if i not in last:
            maker.update(dict.fromkeys(makes, i))
    groups: dict[int, list[int]] = {}
    for i in members:
        groups.setdefault(same.find(i), []).append(i)
    return [*groups.values()]
