"""Cuts scans along a dimension that no iteration mixes, such as the batch dimension of ``jax.vmap``.

Such a scan can be computed in parts along that dimension, each by a scan of its own: so an optimizer that
iterates on all layers' weights at once does it on each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.common_dimension import CommonDimension
from mpmd.compiler.jaxprs.disjoint_sets import DisjointSets
from mpmd.compiler.jaxprs.equations import (
    closed,
    entry_of,
    is_among,
    lookup,
    make_jaxpr,
    shape_of,
    substitute,
    variables,
)
from mpmd.compiler.jaxprs.scans import Scan

DimensionsOf = Callable[[JaxprEqn], Sequence[CommonDimension]]
PartParams = Callable[[JaxprEqn, CommonDimension, int], Mapping[str, Any]]


def batch_dimensions(eqn: JaxprEqn, dimensions_of: DimensionsOf) -> Iterator[CommonDimension]:
    """Yields the dimensions of a scan's operands and results along which its body is elementwise.

    Args:
      dimensions_of: the exact dimensions of an equation in its body.
    """
    if not eqn.effects:
        scan = Scan.of(eqn)
        for members in _groups(scan, dimensions_of):
            yield _outside(scan, members)


def batched_body(
    eqn: JaxprEqn, dimension: CommonDimension, size: int, dimensions_of: DimensionsOf, part_params: PartParams
) -> ClosedJaxpr:
    """The body of a part of a scan, of ``size`` elements along one of its ``batch_dimensions``."""
    scan = Scan.of(eqn)
    members = next(each for each in _groups(scan, dimensions_of) if _outside(scan, each) == dimension)
    renamed: dict[Var, Var] = {var: _resized(var, dim, size) for var, dim in members.items()}
    eqns = []
    for inner in scan.body.eqns:
        common_dimension = _along(inner, members, dimensions_of)
        params = {**inner.params, **(part_params(inner, common_dimension, size) if common_dimension else {})}
        outvars = [renamed.get(var, var) for var in inner.outvars]
        eqns.append(substitute(inner, renamed).replace(outvars=outvars, params=params))
    invars = [renamed.get(var, var) for var in scan.body.invars]
    return closed(make_jaxpr(invars, eqns, [lookup(atom, renamed) for atom in scan.body.outvars]))


def _groups(scan: Scan, dimensions_of: DimensionsOf) -> Iterator[dict[Var, int]]:
    """For each dimension along which the body can be computed in parts, the variables that have it."""
    same: DisjointSets[tuple[Var, int]] = DisjointSets()
    for before, after in scan.carried:
        for dim in range(len(shape_of(before))):
            same.join((var, dim) for var in variables((before, after)))
    for eqn in scan.body.eqns:
        for dimension in dimensions_of(eqn):
            same.join(dimension.of_variables(eqn))
    read, returned = set(scan.body.invars), set(variables(scan.body.outvars))
    for nodes in same.sets():
        members = dict(nodes)
        if (
            not read.isdisjoint(members)
            and not returned.isdisjoint(members)
            and len(members) == len(nodes)
            and len({shape_of(var)[dim] for var, dim in nodes}) == 1
            and all(entry_of(a, members) == entry_of(b, members) for a, b in scan.carried)
            and all(
                _along(eqn, members, dimensions_of) is not None
                for eqn in scan.body.eqns
                if any(is_among(atom, members) for atom in (*eqn.invars, *eqn.outvars))
            )
        ):
            yield members


def _outside(scan: Scan, members: Mapping[Var, int]) -> CommonDimension:
    """Stacked arrays have one dimension more than their variables in the body, the first."""
    invars, outvars = scan.body.invars, scan.body.outvars
    ins = {i: members[var] + (i >= scan.xs.start) for i, var in enumerate(invars) if var in members}
    outs = {i: members[a] + (i >= scan.num_carry) for i, a in enumerate(outvars) if is_among(a, members)}
    return CommonDimension(ins, outs)


def _along(eqn: JaxprEqn, members: Mapping[Var, int], dimensions_of: DimensionsOf) -> CommonDimension | None:
    """The dimension of an equation that these variables have, if its results have it."""
    ins = {i: members[a] for i, a in enumerate(eqn.invars) if is_among(a, members)}
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


def _resized(var: Var, dim: int, size: int) -> Var:
    aval: Any = var.aval
    return Var(aval.update(shape=(*aval.shape[:dim], size, *aval.shape[dim + 1 :])))
