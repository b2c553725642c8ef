"""Cuts scans along a dimension that no iteration mixes, such as the batch dimension of ``jax.vmap``.

Such a scan can be computed in parts along that dimension, each by a scan of its own: so an optimizer that
iterates on all layers' weights at once does it on each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.common_dimension import CommonDimension
from mpmd.compiler.jaxprs.disjoint_sets import DisjointSets
from mpmd.compiler.jaxprs.equations import Atom, closed, lookup, make_jaxpr, shape_of, substitute
from mpmd.compiler.jaxprs.scans import Scan

DimensionsOf = Callable[[JaxprEqn], Sequence[CommonDimension]]
PartParams = Callable[[JaxprEqn, CommonDimension, int], Mapping]


def batch_dimensions(eqn: JaxprEqn, dimensions_of: DimensionsOf) -> Iterator[CommonDimension]:
    """Yields the dimensions of a scan's operands and results along which its body is elementwise.

    Args:
      dimensions_of: the exact dimensions of an equation in its body.
    """
    if eqn.effects:
        return
    body = _Body(eqn, dimensions_of)
    for members in body.groups():
        ins = {i: d + lead for i, lead, var in body.operands if (d := members.get(var)) is not None}
        outs = {i: d + lead for i, lead, var in body.results if (d := members.get(var)) is not None}
        if ins and outs:
            yield CommonDimension(ins, outs)


def batched_body(
    eqn: JaxprEqn, dimension: CommonDimension, size: int, dimensions_of: DimensionsOf, part_params: PartParams
) -> ClosedJaxpr:
    """The body of a part of a scan, of ``size`` elements along one of its ``batch_dimensions``."""
    body = _Body(eqn, dimensions_of)
    position, dim = next(iter(dimension.ins.items()))
    seed = next((var, dim - lead) for i, lead, var in body.operands if i == position)
    members = next(group for group in body.groups() if group.get(seed[0]) == seed[1])
    renamed: dict[Var, Var] = {var: _resized(var, dim, size) for var, dim in members.items()}

    eqns = []
    for inner in body.eqns:
        common_dimension = _along(inner, members, dimensions_of)
        params = {**inner.params, **(part_params(inner, common_dimension, size) if common_dimension else {})}
        outvars = [renamed.get(var, var) for var in inner.outvars]
        eqns.append(substitute(inner, renamed).replace(outvars=outvars, params=params))
    invars = [renamed.get(var, var) for var in body.jaxpr.invars]
    return closed(make_jaxpr(invars, eqns, [lookup(atom, renamed) for atom in body.jaxpr.outvars]))


class _Body:
    """The body of a scan.

    Attributes:
      operands, results: of the scan, with variables: the position, how many dimensions more it has outside,
        and the variable of the body.
    """

    def __init__(self, eqn: JaxprEqn, dimensions_of: DimensionsOf):
        scan = Scan.of(eqn)
        self.jaxpr: Jaxpr = scan.body
        self.eqns = self.jaxpr.eqns
        self.operands = [(i, int(i >= scan.xs.start), var) for i, var in enumerate(self.jaxpr.invars)]
        self.results = [
            (i, int(i >= scan.num_carry), atom)
            for i, atom in enumerate(self.jaxpr.outvars)
            if isinstance(atom, Var)
        ]
        self._carried = scan.carried
        self._dimensions_of = dimensions_of

    def groups(self) -> Iterator[dict[Var, int]]:
        """For each dimension along which the body can be computed in parts, the variables that have it."""
        inside = {var for _, _, var in self.operands}
        outside = {var for _, _, var in self.results}
        for nodes in self._classes():
            members = dict(nodes)
            if inside.isdisjoint(members) or outside.isdisjoint(members):
                continue
            if (
                len(members) == len(nodes)
                and len({shape_of(var)[dim] for var, dim in nodes}) == 1
                and all(_same(members, a, b) for a, b in self._carried)
                and all(
                    _along(eqn, members, self._dimensions_of) is not None
                    for eqn in self.eqns
                    if any(isinstance(atom, Var) and atom in members for atom in (*eqn.invars, *eqn.outvars))
                )
            ):
                yield members

    def _classes(self) -> Iterable[list[tuple[Var, int]]]:
        """Returns the sets of equal dimensions, as pairs of a variable of the body and its dimension."""
        same: DisjointSets[tuple[Var, int]] = DisjointSets()
        for before, after in self._carried:
            for dim in range(len(shape_of(before))):
                same.join((var, dim) for var in (before, after) if isinstance(var, Var))
        for eqn in self.eqns:
            for dimension in self._dimensions_of(eqn):
                same.join(dimension.of_variables(eqn))
        return same.sets()


def _along(eqn: JaxprEqn, members: Mapping[Var, int], dimensions_of: DimensionsOf) -> CommonDimension | None:
    """The dimension of an equation that these variables have, if its results have it."""
    ins = {i: members[a] for i, a in enumerate(eqn.invars) if isinstance(a, Var) and a in members}
    outs = {i: members[var] for i, var in enumerate(eqn.outvars) if var in members}
    if not outs:
        return None
    matching = (
        dimension
        for dimension in dimensions_of(eqn)
        if dimension.outs == outs
        and {i: dim for i, dim in dimension.ins.items() if isinstance(eqn.invars[i], Var)} == ins
    )
    return next(matching, None)


def _same(members: Mapping[Var, int], before: Var, after: Atom) -> bool:
    if isinstance(after, Var):
        return members.get(before) == members.get(after)
    return before not in members


def _resized(var: Var, dim: int, size: int) -> Var:
    aval: Any = var.aval
    return Var(aval.update(shape=(*aval.shape[:dim], size, *aval.shape[dim + 1 :])))
