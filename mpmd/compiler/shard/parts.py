"""Values in parts: what they are, and how they are made of whole ones, and whole ones of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from mpmd.compiler.jaxprs.equations import Atom, traced_eqns
from mpmd.compiler.shard.dimensions import Axes


@dataclasses.dataclass(frozen=True)
class Parts:
    """``var`` has a leading dimension, sharded along the mesh ``axes``; the sum over it is another value."""

    var: Var
    axes: Axes


def parts_of(atom: Atom, known: Mapping[Var, Parts]) -> Parts | None:
    """The parts of an operand, if it has any."""
    return known.get(atom) if isinstance(atom, Var) else None


def make_parts(
    fun: Callable, inputs: Sequence[Atom], axes: Axes, mesh: AbstractMesh
) -> tuple[list[JaxprEqn], list[Parts]]:
    """The equations of ``fun(*inputs)``, a list of values in parts, and what they make.

    The parts are put where the shards are that they come from; the other dimensions are left to XLA.
    """

    def pinned(parts):
        spec = PartitionSpec(axes, *[PartitionSpec.UNCONSTRAINED] * (parts.ndim - 1))
        return lax.with_sharding_constraint(parts, NamedSharding(mesh, spec))

    eqns, variables = traced_eqns(lambda *xs: [pinned(parts) for parts in fun(*xs)], inputs)
    return eqns, [Parts(var, axes) for var in variables]


def first_part(whole: Atom, axes: Axes, mesh: AbstractMesh) -> tuple[list[JaxprEqn], Parts]:
    """Equations that make parts of a whole value: the value itself, then zeros."""
    number = math.prod(mesh.shape[axis] for axis in axes)

    def parts(x):
        shape = (number, *x.shape)
        is_first = lax.broadcasted_iota(jnp.int32, shape, 0) == 0
        return [lax.select(is_first, jnp.broadcast_to(x, shape), jnp.zeros(shape, x.dtype))]

    eqns, (first,) = make_parts(parts, [whole], axes, mesh)
    return eqns, first


def sum_of_parts(parts: Parts, whole: Var) -> JaxprEqn:
    """The equation that makes a whole value of its parts."""
    (eqn,), _ = traced_eqns(lambda x: [lax.reduce_sum(x, (0,))], [parts.var])
    return eqn.replace(outvars=[whole])
