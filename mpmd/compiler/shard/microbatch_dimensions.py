"""Keeps the rows of a batch sharded that the step itself cuts into microbatches.

Such a batch is reshaped from ``(rows, ...)`` to ``(microbatches, rows, ...)``. XLA would give the sharding of
the rows to the dimension of the microbatches: each device would hold whole microbatches, and every task would
gather its microbatch. But the rows of each microbatch have to stay sharded. So no value is sharded along a
dimension that counts microbatches, and a sharding constraint follows each reshape that cuts sharded rows into
microbatches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh, PartitionSpec

from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.jaxprs.canonical import constraint
from mpmd.compiler.jaxprs.equations import aval_of
from mpmd.compiler.jaxprs.rules import likely_dimensions
from mpmd.compiler.jaxprs.sharded_dimensions import ShardedDimensions, as_spec, sharded
from mpmd.ir.plan import Spec
from mpmd.ir.specs import indivisible
from mpmd.sharding import to_sharding


def microbatch_dimensions(outer: Sequence[JaxprEqn], read: Mapping[Var, int]) -> dict[Var, int]:
    """Returns, for values that tasks read and for their outer operands, the dimension of the microbatches.

    Args:
      outer: the equations outside of the loop, in order.
      read: for outer values, the dimension in which tasks read the element at the microbatch index.
    """
    dimension_of = dict(read)
    for eqn in reversed(outer):
        dimension = dimension_of.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
        if dimension is not None:
            for var, operand_dimension in _dimension_of_operands(eqn, dimension):
                dimension_of.setdefault(var, operand_dimension)
    return dimension_of


def with_rows_sharded(
    graph: TaskGraph,
    dimensions: Mapping[Var, ShardedDimensions],
    whole: Mapping[Var, int],
    submeshes: Sequence[AbstractMesh],
) -> TaskGraph:
    """The graph with a sharding constraint behind each reshape that cuts sharded rows into microbatches.

    Args:
      dimensions: the known shardings of values outside the loop.
      whole: for values, the dimension that counts microbatches.
      submeshes: the submeshes of all groups.
    """
    outer: list[JaxprEqn] = []
    for eqn in graph.outer:
        is_cut = eqn.primitive.name == "reshape" and eqn.outvars[0] in whole
        if is_cut and any(sharded(eqn.invars[0], dimensions)):
            result = sharded(eqn.outvars[0], dimensions)
            outer += _constrained(eqn, whole[eqn.outvars[0]], as_spec(result), submeshes)
        else:
            outer.append(eqn)
    return dataclasses.replace(graph, outer=tuple(outer))


def _constrained(
    eqn: JaxprEqn, whole: int, spec: Spec, submeshes: Sequence[AbstractMesh]
) -> Iterator[JaxprEqn]:
    """The equation, with a spec for its result where that divides in every group; ``whole`` is unsharded."""
    (result,) = eqn.outvars
    shape = aval_of(result).shape
    left = {dimension for submesh in submeshes for dimension, _ in indivisible(spec, shape, submesh.shape)}
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(shape)
    for dimension, entry in enumerate(spec):
        if entry is not None and dimension not in left:
            entries[dimension] = entry
    entries[whole] = None
    cut = Var(result.aval)
    yield eqn.replace(outvars=[cut])
    yield constraint(cut, to_sharding(entries, submeshes[0]), eqn).replace(outvars=[result])


def _dimension_of_operands(eqn: JaxprEqn, dimension: int) -> Iterator[tuple[Var, int]]:
    """The operands that share a dimension of the result, with the dimension's number in each operand."""
    size = aval_of(eqn.outvars[0]).shape[dimension]
    for one in likely_dimensions(eqn):
        if one.outs.get(0) == dimension:
            for i, d in one.ins.items():
                atom = eqn.invars[i]
                if isinstance(atom, Var) and aval_of(atom).shape[d] == size:
                    yield atom, d
