"""Finds the dimensions that count microbatches, of values that are computed before the loop.

A batch whose rows are sharded, and that the step itself cuts into microbatches, is reshaped from
``(rows, ...)`` to ``(microbatches, rows, ...)``. XLA would give the sharding of the rows to the first of the
two: each device would hold whole microbatches, and every task would gather the one that it reads. The rows of
each microbatch are what has to stay sharded. So nothing is sharded along the dimension at whose microbatch
index tasks read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import aval_of, operands


def microbatch_dimensions(outer: Sequence[JaxprEqn], read: Mapping[Var, int]) -> dict[Var, int]:
    """The dimensions of values that tasks read at the microbatch index, and of what these are made of.

    Args:
      outer: the equations outside of the loop, in order.
      read: for values of outside the dimension at whose index tasks read.
    """
    found = dict(read)
    for eqn in reversed(outer):
        dimension = found.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
        if dimension is not None:
            for var, own in _dimension_of_operands(eqn, dimension):
                found.setdefault(var, own)
    return found


def _dimension_of_operands(eqn: JaxprEqn, dimension: int) -> Iterator[tuple[Var, int]]:
    """The operands that have a dimension of the result as it is, each with its number there.

    What has no rule here is taken to keep the dimensions of operands of the same rank, if their size stays.
    """
    new = aval_of(eqn.outvars[0]).shape
    for var in operands(eqn):
        old = aval_of(var).shape
        if eqn.primitive.name == "transpose":
            yield var, eqn.params["permutation"][dimension]
        elif eqn.primitive.name == "reshape":
            before = math.prod(new[:dimension])
            for own, size in enumerate(old):
                if size == new[dimension] and math.prod(old[:own]) == before:
                    yield var, own
        elif len(old) == len(new) and old[dimension] == new[dimension]:
            yield var, dimension
