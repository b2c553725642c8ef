"""Functions that are traced again for each group that runs them, because they depend on its submesh."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec

from mpmd.compat import api_boundary
from mpmd.sharding import described, explicit_sharding
from mpmd.util.tree import with_leaves
from mpmd.validation import callable_fault, raise_faults

per_group_p = Primitive("per_group")
"""Computes ``fun`` of flat arrays, a list of arrays; the compiler traces it on the submesh of each group."""
per_group_p.multiple_results = True


@api_boundary
def per_group(fun: Callable) -> Callable:
    """``fun``, traced again for each group that runs it, under the group's own submesh.

    A train step is traced once. That is enough for groups of any sizes, except for code that reads the sizes
    of the submesh while it is traced, such as the function of a ``jax.shard_map``, which sees shards. Under
    ``per_group`` such code works with groups of different sizes::

        @mpmd.per_group
        def gathered(x, w):  # jax.lax.axis_size("data") is the group's
            return jax.shard_map(local, in_specs=(P("data"), P("data")), out_specs=P("data"))(x, w)

    The shapes of the results must not depend on the group. In a backward, ``fun`` is computed again, as under
    ``jax.checkpoint``: its residuals could have other shapes on another group.

    Args:
      fun: from pytrees of arrays to a pytree of arrays. It closes over no traced array: everything that it
        reads is an argument.

    Raises: ``TypeError`` when ``fun`` cannot be called; when it is called, if it closes over a traced array.
    """
    raise_faults(callable_fault("fun", fun))

    @api_boundary
    def wrapper(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        if any(isinstance(constant, jax.core.Tracer) for constant in closed.consts):
            raise TypeError(f"{fun} closes over a traced array: under per_group, make it an argument")
        results = _differentiable(lambda *flat: jax.tree.leaves(fun(*jax.tree.unflatten(treedef, flat))))
        return jax.tree.unflatten(jax.tree.structure(out_shape), results(*leaves))

    return wrapper


def _differentiable(flat: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """``flat`` as an equation, whose derivative is another equation, of the arguments and the cotangents."""

    @jax.custom_vjp
    def call(*args):
        return per_group_p.bind(*args, fun=flat)

    def forward(*args):
        return call(*args), args

    def backward(args, cotangents):
        inexact = [i for i, arg in enumerate(args) if _is_inexact(arg)]
        # The cotangents of integers have a dtype that is not inexact, and no equation takes them.
        differentiated = [_is_inexact(cotangent) for cotangent in cotangents]

        def gradients(*values):
            def of_inexact(*inexact_values):
                whole = with_leaves(values[: len(args)], inexact, inexact_values)
                return list(itertools.compress(flat(*whole), differentiated))

            _, pull_back = jax.vjp(of_inexact, *(values[i] for i in inexact))
            return list(pull_back(list(values[len(args) :])))

        results = per_group_p.bind(*args, *itertools.compress(cotangents, differentiated), fun=gradients)
        by_position = dict(zip(inexact, results, strict=True))
        return tuple(by_position.get(i) for i in range(len(args)))

    call.defvjp(forward, backward)
    return call


def _is_inexact(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


@per_group_p.def_impl
def _impl(*args, fun):
    return jax.jit(fun)(*args)


@per_group_p.def_abstract_eval
def _abstract_eval(*avals, fun):
    return traced_for_group(fun, avals).out_avals


def traced_for_group(fun: Callable[..., list[jax.Array]], avals: Sequence[Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(fun)(*map(described, avals))


def typed_again(fun: Callable[..., list[jax.Array]], avals: Sequence[Any]) -> Callable[..., list[jax.Array]]:
    """Returns ``fun`` for arguments over ``Auto`` axes, which get the explicit shardings in ``avals``."""
    shardings = list(map(explicit_sharding, avals))
    mesh = next((sharding.mesh for sharding in shardings if sharding is not None), None)
    if mesh is None:
        return fun
    axes = [
        axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit
    ]
    specs = tuple(PartitionSpec() if sharding is None else sharding.spec for sharding in shardings)
    return jax.sharding.explicit_axes(fun, axes=tuple(axes), in_sharding=specs)


mlir.register_lowering(per_group_p, mlir.lower_fun(lambda *args, fun: fun(*args), multiple_results=True))
