"""Follows through equations along which mesh axes the dimensions of values are sharded.

It is a guess at what XLA's partitioner will do, in the direction of the computation only. By it ``shard``
keeps rows sharded, gathers weights and cuts sums, and the planner predicts; so a wrong guess costs time and
changes no result. What has no rule here is taken to keep the sharding of an operand of the same rank, along
the dimensions whose size stays. The rules are not those of ``rules.py``: they have a direction, and mesh
axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import remat_p, scan_p

from mpmd.compiler.jaxprs.equations import Atom, aval_of
from mpmd.compiler.jaxprs.scans import scan_operands
from mpmd.ir.plan import Spec

Axes = tuple[str, ...]
Dimensions = tuple[Axes, ...]
"""For each dimension of a value the mesh axes that it is sharded along, the major one first."""

Rule = Callable[[JaxprEqn, Sequence[Dimensions], Mapping[str, int]], Dimensions]


def dimensions_of(spec: Spec, ndim: int) -> Dimensions:
    """The dimensions of a value of rank ``ndim`` with a spec."""
    entries = tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in spec)
    return entries + ((),) * (ndim - len(entries))


def as_spec(dimensions: Dimensions) -> Spec:
    """The spec of a value with these dimensions."""
    entries = list(dimensions)
    while entries and not entries[-1]:
        entries.pop()
    return tuple((entry[0] if len(entry) == 1 else entry) or None for entry in entries)


def axes_in(dimensions: Dimensions) -> set[str]:
    """The mesh axes along which anything is sharded."""
    return {axis for entry in dimensions for axis in entry}


def without(dimensions: Dimensions, axes: Collection[str]) -> Dimensions:
    """The dimensions where nothing is sharded along some axes."""
    return tuple(tuple(axis for axis in entry if axis not in axes) for entry in dimensions)


def sharded(atom: Atom, known: Mapping[Var, Dimensions]) -> Dimensions:
    """The dimensions of an equation's operand."""
    found = known.get(atom) if isinstance(atom, Var) else None
    return found or ((),) * len(aval_of(atom).shape)


def follow(
    eqns: Iterable[JaxprEqn],
    known: Mapping[Var, Dimensions],
    mesh: Mapping[str, int],
    whole: Mapping[Var, int] = MappingProxyType({}),
) -> dict[Var, Dimensions]:
    """The known dimensions of operands, extended by those of the results of equations.

    Args:
      mesh: the size of each mesh axis.
      whole: for values that reshapes make, a dimension along which they are not to be sharded.
    """
    found = dict(known)
    for eqn in eqns:
        operands = [sharded(atom, found) for atom in eqn.invars]
        if any(map(any, operands)) or eqn.primitive.name == "sharding_constraint":
            if eqn.primitive.name == "reshape":
                results: Sequence[Dimensions] = [_reshape(eqn, operands, mesh, whole.get(eqn.outvars[0]))]
            else:
                results = _results(eqn, operands, mesh)
            for var, dimensions in zip(eqn.outvars, results, strict=True):
                if any(dimensions):
                    found[var] = dimensions
    return found


def follow_into(
    jaxpr: Jaxpr, operands: Iterable[Dimensions], eqns: Sequence[JaxprEqn], mesh: Mapping[str, int]
) -> dict[Var, Dimensions]:
    """``follow`` for ``eqns``, which are those of a jaxpr whose inputs are sharded like ``operands``."""
    return follow(eqns, dict(zip(jaxpr.invars, operands, strict=True)), mesh)


def follow_into_scan(
    eqn: JaxprEqn, operands: Sequence[Dimensions], eqns: Sequence[JaxprEqn], mesh: Mapping[str, int]
) -> dict[Var, Dimensions]:
    """``follow`` for ``eqns``, which are those of a scan's body.

    What is carried often starts as zeros, of which nothing is known: it is sharded as an iteration leaves it.
    """
    jaxpr: Jaxpr = eqn.params["jaxpr"].jaxpr
    positions = scan_operands(eqn)
    inside = list(operands)
    inside[positions.xs] = [dimensions[1:] for dimensions in inside[positions.xs]]
    found = follow_into(jaxpr, inside, eqns, mesh)
    for i, atom in zip(range(positions.carry.start, positions.carry.stop), jaxpr.outvars, strict=False):
        if not any(inside[i]):
            inside[i] = sharded(atom, found)
    return follow_into(jaxpr, inside, eqns, mesh)


def _results(eqn: JaxprEqn, operands: Sequence[Dimensions], mesh: Mapping[str, int]) -> Sequence[Dimensions]:
    """The dimensions of an equation's results."""
    if eqn.primitive is remat_p:
        jaxpr: Jaxpr = eqn.params["jaxpr"]
        found = follow_into(jaxpr, operands, jaxpr.eqns, mesh)
        return [sharded(atom, found) for atom in jaxpr.outvars]
    if eqn.primitive is scan_p:
        jaxpr = eqn.params["jaxpr"].jaxpr
        found = follow_into_scan(eqn, operands, jaxpr.eqns, mesh)
        return [
            ((),) * (len(aval_of(var).shape) - len(aval_of(atom).shape)) + sharded(atom, found)
            for var, atom in zip(eqn.outvars, jaxpr.outvars, strict=True)
        ]
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None:
        return [_without_twice(rule(eqn, operands, mesh))]
    if [aval_of(v).shape for v in eqn.outvars] == [aval_of(a).shape for a in eqn.invars]:
        return operands if len(eqn.outvars) > 1 else [operands[0]]
    return [_like_operands(eqn, var, operands) for var in eqn.outvars]


def _without_twice(dimensions: Dimensions) -> Dimensions:
    """Without axes that an earlier dimension has: an axis shards one dimension of a value."""
    seen: set[str] = set()
    result = []
    for axes in dimensions:
        result.append(tuple(axis for axis in axes if axis not in seen))
        seen.update(axes)
    return tuple(result)


def _like_operands(eqn: JaxprEqn, var: Var, operands: Sequence[Dimensions]) -> Dimensions:
    """Each dimension like that of the first operand of the same rank where it is sharded, if sizes agree."""
    shape = aval_of(var).shape
    result: list[Axes] = [()] * len(shape)
    for atom, dimensions in zip(eqn.invars, operands, strict=True):
        if len(dimensions) == len(shape):
            for i, (axes, size) in enumerate(zip(dimensions, aval_of(atom).shape, strict=True)):
                if size == shape[i] and not result[i]:
                    result[i] = axes
    return _without_twice(tuple(result))


def _transpose(eqn: JaxprEqn, operands: Sequence[Dimensions], mesh: Mapping[str, int]) -> Dimensions:
    return tuple(operands[0][i] for i in eqn.params["permutation"])


def _broadcast(eqn: JaxprEqn, operands: Sequence[Dimensions], mesh: Mapping[str, int]) -> Dimensions:
    shape = eqn.params["shape"]
    result: list[Axes] = [()] * len(shape)
    for i, j in enumerate(eqn.params["broadcast_dimensions"]):
        if aval_of(eqn.invars[0]).shape[i] == shape[j]:
            result[j] = operands[0][i]
    return tuple(result)


def _squeeze(eqn: JaxprEqn, operands: Sequence[Dimensions], mesh: Mapping[str, int]) -> Dimensions:
    return tuple(axes for i, axes in enumerate(operands[0]) if i not in eqn.params["dimensions"])


def _reduce(eqn: JaxprEqn, operands: Sequence[Dimensions], mesh: Mapping[str, int]) -> Dimensions:
    return tuple(axes for i, axes in enumerate(operands[0]) if i not in eqn.params["axes"])


def _dot(eqn: JaxprEqn, operands: Sequence[Dimensions], mesh: Mapping[str, int]) -> Dimensions:
    (left_summed, right_summed), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = operands
    batch = tuple(left[i] or right[j] for i, j in zip(left_batch, right_batch, strict=True))
    return (
        *batch,
        *(axes for i, axes in enumerate(left) if i not in (*left_summed, *left_batch)),
        *(axes for i, axes in enumerate(right) if i not in (*right_summed, *right_batch)),
    )


def _reshape(
    eqn: JaxprEqn, operands: Sequence[Dimensions], mesh: Mapping[str, int], whole: int | None = None
) -> Dimensions:
    """Dimensions that are merged or split have the sharding of the first, if it divides what comes of it.

    Where the dimension ``whole`` comes of it, the next one has the sharding, as far as it divides.
    """
    old, new = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    result: list[Axes] = [()] * len(new)
    i = j = 0
    while i < len(old) and j < len(new):
        first, target, before, after = i, j, old[i], new[j]
        while before != after:
            if before < after:
                i += 1
                before *= old[i]
            else:
                j += 1
                after *= new[j]
        # A dimension of size one before the first real one is no place for a sharding.
        first = next((k for k in range(first, i) if old[k] > 1), i)
        target = next((k for k in range(target, j) if new[k] > 1 and k != whole), j)
        axes = operands[0][first] if target != whole else ()
        while whole is not None and new[target] % math.prod(mesh[axis] for axis in axes):
            axes = axes[:-1]
        if new[target] % math.prod(mesh[axis] for axis in axes) == 0:
            result[target] = axes
        i, j = i + 1, j + 1
    return tuple(result)


def _gather(eqn: JaxprEqn, operands: Sequence[Dimensions], mesh: Mapping[str, int]) -> Dimensions:
    """The dimensions of the result that are not those of a slice are those of the indices, in their order."""
    indices = iter(operands[1][:-1])
    offset = eqn.params["dimension_numbers"].offset_dims
    return tuple(() if i in offset else next(indices) for i in range(len(aval_of(eqn.outvars[0]).shape)))


def _scatter(eqn: JaxprEqn, operands: Sequence[Dimensions], mesh: Mapping[str, int]) -> Dimensions:
    numbers = eqn.params["dimension_numbers"]
    result = list(operands[0])
    batching = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for i, j in batching:
        result[i] = result[i] or operands[1][j]
    return tuple(result)


def _convolution(eqn: JaxprEqn, operands: Sequence[Dimensions], mesh: Mapping[str, int]) -> Dimensions:
    numbers = eqn.params["dimension_numbers"]
    result: list[Axes] = [()] * len(numbers.out_spec)
    result[numbers.out_spec[0]] = operands[0][numbers.lhs_spec[0]]
    return tuple(result)


def _constraint(eqn: JaxprEqn, operands: Sequence[Dimensions], mesh: Mapping[str, int]) -> Dimensions:
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None:
        return operands[0]
    entries = [*spec, *([None] * (len(operands[0]) - len(spec)))]
    return tuple(
        axes if entry is spec.UNCONSTRAINED else dimensions_of((entry,), 1)[0]
        for axes, entry in zip(operands[0], entries, strict=True)
    )


_RULES: Mapping[str, Rule] = {
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dot_general": _dot,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "conv_general_dilated": _convolution,
    "sharding_constraint": _constraint,
    **dict.fromkeys(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split(),
        _reduce,
    ),
}
