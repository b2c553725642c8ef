"""Makes partial sums of whole values, and whole values of partial sums."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh, PartitionSpec

from mpmd.compiler.jaxprs.equations import Atom
from mpmd.compiler.jaxprs.sharded_dimensions import Axes
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.sharding import to_sharding


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """``var`` has a leading dimension, sharded along the mesh ``axes``; the sum over it is another value."""

    var: Var
    axes: Axes


def as_function(eqn: JaxprEqn) -> Callable[..., list[jax.Array]]:
    # Transposition leaves shardings here of meshes that are automatic, which mean nothing.
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in eqn.params.items()}

    def results(*operands: jax.Array) -> list[jax.Array]:
        outputs = eqn.primitive.bind(*operands, **params)
        return outputs if eqn.primitive.multiple_results else [outputs]

    return results


class PartialSumMaker:
    """Writes the equations of partial sums, and traces equal ones, as of equal layers, once.

    Args:
      mesh: the shape of a group's submesh.
    """

    def __init__(self, mesh: AbstractMesh):
        self.mesh = mesh
        self._traced: dict[Hashable, jax.stages.Wrapped] = {}

    def make(
        self, fun: Callable, inputs: Sequence[Atom], axes: Axes, key: Hashable
    ) -> tuple[list[JaxprEqn], list[PartialSum]]:
        """Returns the equations of ``fun(*inputs)``, a list of partial sums, and their results.

        A sharding constraint puts each partial sum on the device with its shard of the operands; XLA chooses
        the sharding of the other dimensions.

        Args:
          key: equal for functions that are equal.
        """

        def pinned(sums):
            entries: list[Any] = [axes, *[PartitionSpec.UNCONSTRAINED] * (sums.ndim - 1)]
            return lax.with_sharding_constraint(sums, to_sharding(entries, self.mesh))

        if (key, axes) not in self._traced:
            self._traced[key, axes] = jax.jit(lambda *xs: [pinned(sums) for sums in fun(*xs)])
        eqns, variables = traced_eqns(self._traced[key, axes], inputs)
        return eqns, [PartialSum(var, axes) for var in variables]

    def as_first(self, whole: Atom, axes: Axes) -> tuple[list[JaxprEqn], PartialSum]:
        """Equations that make partial sums of a whole value: the value itself, then zeros."""
        number = math.prod(self.mesh.shape[axis] for axis in axes)

        def with_zeros(x):
            shape = (number, *x.shape)
            is_first = lax.broadcasted_iota(jnp.int32, shape, 0) == 0
            return [lax.select(is_first, jnp.broadcast_to(x, shape), jnp.zeros(shape, x.dtype))]

        eqns, (first,) = self.make(with_zeros, [whole], axes, "first")
        return eqns, first

    def sum_up(self, partial: PartialSum, whole: Var) -> JaxprEqn:
        (eqn,), _ = traced_eqns(_summed, [partial.var])
        return eqn.replace(outvars=[whole])


_summed = jax.jit(lambda sums: [lax.reduce_sum(sums, (0,))])
