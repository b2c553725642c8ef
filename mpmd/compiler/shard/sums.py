"""Rewrites an equation that sums over a sharded dimension to give one partial sum for each shard.

XLA would end the original equation with an all-reduce.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.rules import common_dimensions
from mpmd.compiler.jaxprs.sharded_dimensions import Axes, ShardedDimensions
from mpmd.compiler.shard.linear import is_zero
from mpmd.compiler.shard.make_partial_sums import as_function

CutPoint = tuple[int, int]
"""A dimension of an operand, and the number of pieces that it is cut into."""


SUMS = frozenset({"dot_general", "reduce_sum", "scatter-add"})


@dataclasses.dataclass(frozen=True)
class CutSum:
    """``partial_sums(*operands)`` has a new leading dimension that counts them, sharded along ``axes``."""

    axes: Axes
    partial_sums: Callable[..., Sequence[jax.Array]]
    cut_points: tuple[tuple[CutPoint, ...], ...]  # for each operand


def cut_sum(
    eqn: JaxprEqn,
    operands: Sequence[ShardedDimensions],
    allowed: frozenset[str],
    mesh: Mapping[str, int],
    makers: Mapping[Var, JaxprEqn],
) -> CutSum | None:
    """An equation's partial sums along mesh axes that are ``allowed``, if it sums over such dimensions.

    Args:
      operands: how the equation's operands are sharded.
      mesh: the size of each mesh axis.
      makers: for each operand, the equation that computes it.
    """
    name = eqn.primitive.name
    if name not in SUMS or (name == "scatter-add" and not is_zero(eqn.invars[0], makers)):
        return None
    dimensions = list(common_dimensions(eqn))
    # Along the axes of other dimensions values would have to move to be cut.
    kept = [operands[i][d] for one in dimensions if not one.is_reduced for i, d in one.ins.items()]
    allowed = allowed.difference(*kept)
    axes: Axes = ()
    cut_points: list[list[CutPoint]] = [[] for _ in operands]
    for one in dimensions:
        if one.is_reduced:
            ends = [operands[i][d] for i, d in one.ins.items()]
            chosen = _axes_to_cut(one.size(eqn), ends, allowed.difference(axes), mesh)
            axes += chosen
            for i, d in one.ins.items() if chosen else ():
                cut_points[i].append((d, math.prod(mesh[axis] for axis in chosen)))
    if not axes:
        return None
    each = jax.vmap(as_function(eqn), tuple(0 if cut else None for cut in cut_points))
    return CutSum(axes, lambda *xs: each(*map(_cut, xs, cut_points)), tuple(map(tuple, cut_points)))


def _axes_to_cut(size: int, ends: Sequence[Axes], allowed: frozenset[str], mesh: Mapping[str, int]) -> Axes:
    """The axes along which a dimension is cut; none if its ends are sharded differently.

    The pieces have to be contiguous, so the dimension is cut along its first axes that may be cut.

    Args:
      ends: the mesh axes of the dimension in each operand that has it; empty where unknown.
    """
    known = [axes for axes in ends if axes]
    if not known or known[0] != known[-1]:
        return ()
    axes = tuple(itertools.takewhile(allowed.__contains__, known[0]))
    number = math.prod(mesh[axis] for axis in axes)
    return axes if number > 1 and size % number == 0 else ()


def _cut(x: jax.Array, cut_points: Sequence[CutPoint]) -> jax.Array:
    """Reshapes ``x``: the pieces of all cut dimensions become one leading dimension."""
    if not cut_points:
        return x
    number_of = dict(cut_points)
    shape: list[int] = []
    position: dict[int, int] = {}
    for i, size in enumerate(x.shape):
        position[i] = len(shape)
        shape += [number_of[i], size // number_of[i]] if i in number_of else [size]
    first = [position[i] for i, _ in cut_points]
    x = jnp.moveaxis(lax.reshape(x, shape), first, range(len(first)))
    return lax.reshape(x, (math.prod(number_of.values()), *x.shape[len(first) :]))
