"""Follows through equations along which mesh axes the dimensions of values are sharded.

It is a guess at what XLA's partitioner will do, in the direction of the computation. The pass ``shard``
uses the guess to keep rows sharded, gather weights and cut sums, and the planner to predict; so a wrong guess
costs time and changes no result. The table of rules maps dimensions of operands to dimensions of results; a
dimension without a rule is taken to stay in its place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import remat_p, scan_p

from mpmd.compiler.jaxprs.common_dimension import CommonDimension
from mpmd.compiler.jaxprs.cost import is_elementwise
from mpmd.compiler.jaxprs.equations import Atom, aval_of, entry_of, variables
from mpmd.compiler.jaxprs.rules import likely_dimensions, reshaped
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.ir.plan import Spec
from mpmd.ir.specs import axes_of, dimensions_of
from mpmd.sharding import for_each_dimension

Axes = tuple[str, ...]
ShardedDimensions = tuple[Axes, ...]
"""For each dimension of a value the mesh axes that it is sharded along, the major one first."""


def as_spec(dimensions: ShardedDimensions) -> Spec:
    entries = list(dimensions)
    while entries and not entries[-1]:
        entries.pop()
    return tuple((entry[0] if len(entry) == 1 else entry) or None for entry in entries)


def without(dimensions: ShardedDimensions, axes: Collection[str]) -> ShardedDimensions:
    return tuple(tuple(axis for axis in entry if axis not in axes) for entry in dimensions)


def sharded(atom: Atom, known: Mapping[Var, ShardedDimensions]) -> ShardedDimensions:
    """Returns the sharding of each dimension of an operand, ``()`` where it is not known."""
    return entry_of(atom, known) or ((),) * len(aval_of(atom).shape)


def follow(
    eqns: Iterable[JaxprEqn],
    known: Mapping[Var, ShardedDimensions],
    mesh: Mapping[str, int],
    whole: Mapping[Var, int] = MappingProxyType({}),
) -> dict[Var, ShardedDimensions]:
    """Extends known shardings of operands to the results of equations.

    Args:
      mesh: the size of each mesh axis.
      whole: for results of reshapes, a dimension along which they must not be sharded.
    """
    dimensions_by_var = dict(known)
    for eqn in eqns:
        read = [sharded(atom, dimensions_by_var) for atom in eqn.invars]
        if any(map(any, read)) or eqn.primitive.name == "sharding_constraint":
            results: Sequence[ShardedDimensions]
            if eqn.primitive.name == "sharding_constraint":
                results = [_without_twice(_constrained(eqn, read[0]))]
            elif eqn.primitive.name == "reshape" and eqn.outvars[0] in whole:
                results = [_cut_into_microbatches(eqn, read[0], mesh, whole[eqn.outvars[0]])]
            else:
                results = _results(eqn, read, mesh)
            for var, dimensions in zip(eqn.outvars, results, strict=True):
                if any(dimensions):
                    dimensions_by_var[var] = dimensions
    return dimensions_by_var


def _follow_body(
    body: Jaxpr, operands: Sequence[ShardedDimensions], mesh: Mapping[str, int]
) -> dict[Var, ShardedDimensions]:
    return follow(body.eqns, dict(zip(body.invars, operands, strict=True)), mesh)


def follow_back(
    eqns: Sequence[JaxprEqn],
    known: Mapping[Var, ShardedDimensions],
    fixed: Collection[Var] = frozenset(),
) -> dict[Var, ShardedDimensions]:
    """Extends known shardings from results of elementwise equations and transpositions to their operands.

    So gradients are sharded like the accumulators to which they are added, and terms of a sum like one
    another.

    Args:
      fixed: operands whose shardings stay as they are.
    """
    extended = dict(known)
    for eqn in reversed(eqns):
        of_result = extended.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
        if of_result is None or not (is_elementwise(eqn) or eqn.primitive.name == "transpose"):
            continue
        if eqn.primitive.name == "transpose":
            permutation = eqn.params["permutation"]
            of_result = tuple(of_result[permutation.index(d)] for d in range(len(of_result)))
        for atom in variables(eqn.invars):
            if atom not in fixed and len(aval_of(atom).shape) == len(of_result):
                extended[atom] = _completed(sharded(atom, extended), of_result)
    return extended


def _completed(dimensions: ShardedDimensions, others: ShardedDimensions) -> ShardedDimensions:
    """Adds to each dimension the axes of another sharding that shard no dimension of the value yet."""
    known = axes_of(dimensions)
    return tuple(
        axes or tuple(axis for axis in other if axis not in known)
        for axes, other in zip(dimensions, others, strict=True)
    )


def follow_inside(
    eqn: JaxprEqn, operands: Sequence[ShardedDimensions], mesh: Mapping[str, int]
) -> tuple[Jaxpr, dict[Var, ShardedDimensions]] | None:
    """Follows shardings of operands into a scan or a rematerialised function; ``None`` for other equations.

    A carried value often starts as zeros without a known sharding: it is then sharded as the body returns it.

    Returns: the body, and the shardings of its values.
    """
    if eqn.primitive is remat_p:
        body: Jaxpr = eqn.params["jaxpr"]
        return body, _follow_body(body, operands, mesh)
    if eqn.primitive is not scan_p:
        return None
    scan = Scan.of(eqn)
    inside = list(operands)
    inside[scan.xs] = [dimensions[1:] for dimensions in inside[scan.xs]]
    in_body = _follow_body(scan.body, inside, mesh)
    for i, (_, after) in enumerate(scan.carried, scan.carry.start):
        if not any(inside[i]):
            inside[i] = sharded(after, in_body)
    return scan.body, _follow_body(scan.body, inside, mesh)


def _results(
    eqn: JaxprEqn, operands: Sequence[ShardedDimensions], mesh: Mapping[str, int]
) -> Sequence[ShardedDimensions]:
    if (inside := follow_inside(eqn, operands, mesh)) is not None:
        body, in_body = inside
        return [
            ((),) * (len(aval_of(var).shape) - len(aval_of(atom).shape)) + sharded(atom, in_body)
            for var, atom in zip(eqn.outvars, body.outvars, strict=True)
        ]
    if eqn.primitive.name == "shard_map" and mesh.keys() >= {*eqn.params["mesh"].axis_names}:
        pairs = zip(eqn.params["out_specs"], eqn.outvars, strict=True)
        return [dimensions_of(spec, len(aval_of(var).shape)) for spec, var in pairs]
    results: list[list[Axes]] = [[()] * len(aval_of(var).shape) for var in eqn.outvars]
    for one in likely_dimensions(eqn):
        for i, d in one.outs.items():
            size = aval_of(eqn.outvars[i]).shape[d]
            results[i][d] = results[i][d] or _axes_along(eqn, one, operands, size, mesh)
    return [_without_twice(dimensions) for dimensions in results]


def _axes_along(
    eqn: JaxprEqn,
    dimension: CommonDimension,
    operands: Sequence[ShardedDimensions],
    size: int,
    mesh: Mapping[str, int],
) -> Axes:
    for i, d in dimension.ins.items():
        if axes := operands[i][d]:
            is_kept = aval_of(eqn.invars[i]).shape[d] == size
            return axes if is_kept or size % _number(axes, mesh) == 0 else ()
    return ()


def _number(axes: Axes, mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def _without_twice(dimensions: Iterable[Axes]) -> ShardedDimensions:
    """Without axes that an earlier dimension has: an axis shards one dimension of a value."""
    seen: set[str] = set()
    result = []
    for axes in dimensions:
        result.append(tuple(axis for axis in axes if axis not in seen))
        seen.update(axes)
    return tuple(result)


def _cut_into_microbatches(
    eqn: JaxprEqn, operand: ShardedDimensions, mesh: Mapping[str, int], whole: int
) -> ShardedDimensions:
    """Returns the shardings of a reshape's result whose dimension ``whole`` must not be sharded.

    Of dimensions that are merged, the first has the sharding; of dimensions that a reshape splits, the first
    but ``whole`` gets its leading axes whose sizes divide the dimension.
    """
    old, new = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    result: list[Axes] = [()] * len(new)
    for merged, split in reshaped(eqn):
        first = next((d for d in merged if old[d] > 1), merged[-1])
        target = next((d for d in split if new[d] > 1 and d != whole), split[-1])
        axes = operand[first] if target != whole else ()
        while new[target] % _number(axes, mesh):
            axes = axes[:-1]
        result[target] = axes
    return tuple(result)


def _constrained(eqn: JaxprEqn, operand: ShardedDimensions) -> ShardedDimensions:
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None:
        return operand
    entries = for_each_dimension(spec, len(operand))
    return tuple(
        axes if entry is spec.UNCONSTRAINED else dimensions_of((entry,), 1)[0]
        for axes, entry in zip(operand, entries, strict=True)
    )
