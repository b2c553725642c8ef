"""Exchanges of an equation's values between devices: which are all-reduced, gathered or scattered."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import Atom, operands
from mpmd.compiler.jaxprs.rules import common_dimensions
from mpmd.compiler.jaxprs.sharded_dimensions import ShardedDimensions, sharded
from mpmd.ir.specs import axes_of


class MovingConstraints(NamedTuple):
    """Sharding constraints that move data.

    Attributes:
      gathers: the results of constraints that gather, with their operands.
      scatters: sums that a constraint scatters over devices, with the parts.
    """

    gathers: dict[Var, Var]
    scatters: dict[Var, Var]


def moving_constraints(
    eqns: Sequence[JaxprEqn],
    known: Mapping[Var, ShardedDimensions],
    mesh: Mapping[str, int],
    kept: Collection[Var],
) -> MovingConstraints:
    """Returns the sharding constraints that move data: gathers of sharded values, and scatters of partial
    sums.

    Args:
      known: the shardings of values that are known.
      mesh: the size of each axis.
      kept: values that are read outside of ``eqns``, too.
    """
    readers = collections.Counter(atom for eqn in eqns for atom in set(operands(eqn)))
    moving = MovingConstraints({}, {})
    for eqn in eqns:
        if eqn.primitive.name == "sharding_constraint" and isinstance(operand := eqn.invars[0], Var):
            (result,) = eqn.outvars
            before, after = (axes_of(sharded(var, known)) for var in (operand, result))
            if any(mesh[axis] > 1 for axis in before - after):
                moving.gathers[result] = operand
            elif after - before and readers[operand] == 1 and operand not in kept:
                moving.scatters[operand] = result
    return moving


def crossing_axes(
    eqn: JaxprEqn, shardings: Sequence[ShardedDimensions], result_axes: set[str]
) -> tuple[set[str], dict[str, Atom]]:
    """Returns the axes along which results are all-reduced, and for each axis with a gather or scatter, the
    value.

    Where a product contracts a sharded dimension, or a reduction removes one, each device has a part of the
    sum. If another dimension of the result is sharded along the same axis, the sum is scattered, or, if
    only one operand of a product is sharded along it, that operand is gathered.

    Args:
      shardings: the shardings of the operands.
      result_axes: the axes that shard the results.
    """
    name: str = eqn.primitive.name
    numbers: Any = eqn.params.get("dimension_numbers")
    if name == "gather":
        removed = [(0, axis) for d in numbers.start_index_map for axis in shardings[0][d]]
    elif name.startswith("psum"):
        removed = [(0, axis) for axis in eqn.params["axes"]]
    elif name == "scatter-add":
        removed = [(2, axis) for dimensions in shardings[2] for axis in dimensions if axis not in result_axes]
    else:
        reduced = (one.ins.items() for one in common_dimensions(eqn) if one.is_reduced)
        removed = [(i, axis) for i, d in itertools.chain(*reduced) for axis in shardings[i][d]]
    summed = {axis for _, axis in removed if axis not in result_axes}
    moved: dict[str, Atom] = {}
    for position, axis in removed:
        if axis in result_axes:
            is_sum = name.startswith("reduce_") or (1 - position, axis) in removed
            moved[axis] = eqn.outvars[0] if is_sum else eqn.invars[position]
    return summed, moved
