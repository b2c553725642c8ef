"""Finds the dimensions of a microbatch: its rows, and further dimensions along which devices may divide
it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import makers_of, shape_of
from mpmd.compiler.jaxprs.flat import FlatEquations, Operation, Value
from mpmd.compiler.jaxprs.rules import reshaped, shared_dimensions


class MicrobatchDim(NamedTuple):
    """A dimension of a microbatch, which is a part of a batch.

    Attributes:
      batch, batch_dim: the value outside of the loop, and its dimension.
      value, dim: the value in the loop that is a part of ``batch``, and its dimension.
      size: the size of ``dim``.
    """

    batch: Var
    batch_dim: int
    value: Value
    dim: int
    size: int


def microbatch_dims(
    flat: FlatEquations, operations: Iterable[Operation], batch: Collection[Var]
) -> list[MicrobatchDim]:
    """The dimensions of microbatches, from the operations that slice the batch.

    Args:
      batch: the values outside of the loop of which a microbatch is a part.
    """
    outside = {flat.value(var): var for var in batch}
    dims: dict[tuple[Var, int], MicrobatchDim] = {}
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
                dims.setdefault((taken.batch, batch_dim), taken)
    return list(dims.values())


def rows_to_cut(dims: Iterable[MicrobatchDim], num_microbatches: int) -> int:
    """The rows of each microbatch of a batch that ``mpmd.microbatches`` has cut, its second dimension.

    It is 0 where none is cut so. Where rows depend on one another, devices divide another dimension.
    """
    of_batches = (dim for dim in dims if shape_of(dim.batch)[0] == num_microbatches and dim.batch_dim == 1)
    return math.gcd(*(dim.size for dim in of_batches))


def _taken(operation: Operation) -> Iterator[tuple[int, int]]:
    """Yields each dimension of the operand that the slice keeps, with the dimension of the slice."""
    if operation.eqn.primitive.name == "dynamic_slice":
        yield from ((dim, dim) for dim in range(len(shape_of(operation.eqn.outvars[0]))))
    elif operation.eqn.primitive.name == "gather":
        yield from (
            (use.ins[0], use.outs[0]) for use in shared_dimensions(operation.eqn) if 0 in use.ins and use.outs
        )


def origin_of(var: Var, dim: int, eqns: Sequence[JaxprEqn]) -> tuple[Var, int] | None:
    """Traces a dimension of ``var`` back to the dimension of an argument that it equals or is a part of.

    Rows that are cut into microbatches, ``(n * rows, ...)`` to ``(n, rows, ...)``, belong to the argument's
    first dimension.

    Args:
      eqns: the equations that compute ``var`` from the arguments; may be empty if ``var`` is an argument.

    Returns: the argument and its dimension; ``None`` if ``dim`` comes from no single dimension of one.
    """
    makers = makers_of(eqns)
    while (eqn := makers.get(var)) is not None:
        uses = (use for use in shared_dimensions(eqn) if use.outs.get(eqn.outvars.index(var)) == dim)
        ins = next((use.ins for use in uses), {})
        if not ins and eqn.primitive.name == "reshape":
            ins = _split_of(eqn, dim)
        sources = ((atom, ins[i]) for i, atom in enumerate(eqn.invars) if i in ins and isinstance(atom, Var))
        source = next(sources, None)
        if source is None:
            return None
        var, dim = source
    return var, dim


def _split_of(eqn: JaxprEqn, dim: int) -> dict[int, int]:
    """The dimension of a reshape's operand that the reshape splits into ``dim`` and further dimensions,
    as ``{0: dimension}``; empty if there is no single one longer than 1."""
    shape = shape_of(eqn.invars[0])
    sources = (old for old, new in reshaped(eqn) if dim in new)
    longer = [d for d in next(sources, ()) if shape[d] > 1]
    return {0: longer[0]} if len(longer) == 1 else {}
