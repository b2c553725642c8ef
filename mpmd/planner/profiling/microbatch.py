"""Finds the dimensions of a microbatch: its rows, and what else values between layers may be divided by."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from jax.extend.core import Var

from mpmd.compiler.jaxprs.axes import shape_of
from mpmd.compiler.jaxprs.flat import FlatEquations, Operation, Value
from mpmd.compiler.jaxprs.uses import uses_of


class MicrobatchDim(NamedTuple):
    """A dimension of the part of a batch that a microbatch is.

    Attributes:
      batch, batch_dim: the value outside of the loop, and its dimension.
      value, dim: the part of it, and its dimension.
      size: of the part.
    """

    batch: Var
    batch_dim: int
    value: Value
    dim: int
    size: int


def microbatch_dims(
    flat: FlatEquations, operations: Iterable[Operation], batch: Collection[Var]
) -> list[MicrobatchDim]:
    """The dimensions of microbatches that have several elements, by the operations that take them.

    Args:
      batch: the values outside of the loop of which a microbatch is a part.
    """
    outside = {flat.value(var): var for var in batch}
    found: dict[tuple[Var, int], MicrobatchDim] = {}
    for operation in operations:
        value = operation.reads[0] if operation.reads else None
        if value in outside:
            for batch_dim, dim in _taken(operation):
                taken = MicrobatchDim(
                    outside[value],
                    batch_dim,
                    operation.makes[0],
                    dim,
                    shape_of(operation.eqn.outvars[0])[dim],
                )
                found.setdefault((taken.batch, batch_dim), taken)
    return [taken for taken in found.values() if taken.size > 1]


def _taken(operation: Operation) -> Iterator[tuple[int, int]]:
    """For dimensions of the part that an operation takes, which of the whole they are."""
    if operation.eqn.primitive.name == "dynamic_slice":
        yield from ((dim, dim) for dim in range(len(shape_of(operation.eqn.outvars[0]))))
    elif operation.eqn.primitive.name == "gather":
        yield from ((use.ins[0], use.outs[0]) for use in uses_of(operation.eqn) if 0 in use.ins and use.outs)
