"""Cuts equations that sum over a sharded dimension into parts, one for each shard of it.

Each of these is what XLA would end with an all-reduce.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.dimensions import Axes, Dimensions
from mpmd.compiler.jaxprs.equations import aval_of
from mpmd.compiler.shard.linear import is_zero

CutPoint = tuple[int, int]
"""A dimension of an operand, and the number of parts that it is cut into."""


@dataclasses.dataclass(frozen=True)
class CutSum:
    """``parts(*operands)`` has a new leading dimension, sharded along ``axes``, over which it sums up."""

    axes: Axes
    parts: Callable[..., jax.Array]
    cut_points: tuple[tuple[CutPoint, ...], ...]  # for each operand that is cut


def cut_sum(
    eqn: JaxprEqn,
    operands: Sequence[Dimensions],
    allowed: frozenset[str],
    mesh: Mapping[str, int],
    makers: Mapping[Var, JaxprEqn],
) -> CutSum | None:
    """An equation's sum in parts along mesh axes that are ``allowed``, if it sums over such dimensions.

    Args:
      operands: how the equation's operands are sharded.
      mesh: the size of each mesh axis.
      makers: the equations that make what is read here.
    """
    if eqn.primitive.name == "scatter-add" and not is_zero(eqn.invars[0], makers):
        return None
    find = _SUMS.get(eqn.primitive.name)
    return find(eqn, operands, _Cutter(allowed, mesh)) if find else None


@dataclasses.dataclass
class _Cutter:
    """Chooses the axes along which the dimensions of one sum are cut."""

    allowed: frozenset[str]
    mesh: Mapping[str, int]
    axes: Axes = ()

    def leave(self, *others: Axes) -> None:
        """Leaves out the axes of other dimensions: values would have to move to be cut along these."""
        self.allowed = self.allowed.difference(*others)

    def parts(self, size: int, *ends: Axes) -> int:
        """In how many parts a dimension is cut that is sharded like this, as far as known at either end.

        Of an end's axes the first ones count, because the parts have to be whole pieces of the dimension.
        """
        known = [axes for axes in ends if axes]
        if not known or known[0] != known[-1]:
            return 1
        chosen: list[str] = []
        for axis in known[0]:
            if axis not in self.allowed or axis in self.axes:
                break
            chosen.append(axis)
        number = math.prod(self.mesh[axis] for axis in chosen)
        if number == 1 or size % number:
            return 1
        self.axes += tuple(chosen)
        return number

    def cut(self, parts: Callable[..., jax.Array], *cut_points: Sequence[CutPoint]) -> CutSum | None:
        return CutSum(self.axes, parts, tuple(map(tuple, cut_points))) if self.axes else None


def _dot(eqn: JaxprEqn, operands: Sequence[Dimensions], cutter: _Cutter) -> CutSum | None:
    (left_summed, right_summed), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    shape = aval_of(eqn.invars[0]).shape
    pairs = list(zip(left_summed, right_summed, strict=True))
    kept = [axes for i, axes in enumerate(operands[0]) if i not in left_summed]
    kept += [axes for j, axes in enumerate(operands[1]) if j not in right_summed]
    cutter.leave(*kept)
    numbers = [cutter.parts(shape[i], operands[0][i], operands[1][j]) for i, j in pairs]
    lefts = [(i, n) for (i, _), n in zip(pairs, numbers, strict=True) if n > 1]
    rights = [(j, n) for (_, j), n in zip(pairs, numbers, strict=True) if n > 1]
    batched = (
        (_behind(left_summed), _behind(right_summed)),
        ((0, *_behind(left_batch)), (0, *_behind(right_batch))),
    )

    def parts(left, right):
        return lax.dot_general(
            _cut(left, lefts),
            _cut(right, rights),
            batched,
            precision=eqn.params["precision"],
            preferred_element_type=eqn.params["preferred_element_type"],
        )

    return cutter.cut(parts, lefts, rights)


def _reduce_sum(eqn: JaxprEqn, operands: Sequence[Dimensions], cutter: _Cutter) -> CutSum | None:
    shape = aval_of(eqn.invars[0]).shape
    summed = eqn.params["axes"]
    cut_points = [(i, n) for i in summed if (n := cutter.parts(shape[i], operands[0][i])) > 1]
    return cutter.cut(lambda x: lax.reduce_sum(_cut(x, cut_points), _behind(summed)), cut_points)


def _scatter_add(eqn: JaxprEqn, operands: Sequence[Dimensions], cutter: _Cutter) -> CutSum | None:
    """The gradient of a table of embeddings: rows that are added at the positions of tokens.

    They are added to zeros, so each part starts from zeros, too.
    """
    numbers = eqn.params["dimension_numbers"]
    shape = aval_of(eqn.invars[1]).shape
    rows = [i for i in range(len(aval_of(eqn.invars[2]).shape)) if i not in numbers.update_window_dims]
    pairs = [(i, j) for i, j in enumerate(rows) if i not in numbers.scatter_indices_batching_dims]
    found = [(i, j, cutter.parts(shape[i], operands[1][i], operands[2][j])) for i, j in pairs]
    of_indices = [(i, n) for i, _, n in found if n > 1]
    of_updates = [(j, n) for _, j, n in found if n > 1]

    def parts(table, indices, updates):
        def one(indices, updates):
            return eqn.primitive.bind(table, indices, updates, **eqn.params)

        return jax.vmap(one)(_cut(indices, of_indices), _cut(updates, of_updates))

    return cutter.cut(parts, of_indices, of_updates)


def _cut(x: jax.Array, cut_points: Sequence[CutPoint]) -> jax.Array:
    """``x`` with dimensions cut into parts; the parts of all come first, as one dimension."""
    number_of = dict(cut_points)
    shape: list[int] = []
    position: dict[int, int] = {}
    for i, size in enumerate(x.shape):
        position[i] = len(shape)
        shape += [number_of[i], size // number_of[i]] if i in number_of else [size]
    first = [position[i] for i, _ in cut_points]
    x = jnp.moveaxis(lax.reshape(x, shape), first, range(len(first)))
    return lax.reshape(x, (math.prod(number_of.values()), *x.shape[len(first) :]))


def _behind(dimensions: Sequence[int]) -> tuple[int, ...]:
    """The dimensions, where a new one comes first."""
    return tuple(i + 1 for i in dimensions)


_SUMS: Mapping[str, Callable[[JaxprEqn, Sequence[Dimensions], _Cutter], CutSum | None]] = {
    "dot_general": _dot,
    "reduce_sum": _reduce_sum,
    "scatter-add": _scatter_add,
}
