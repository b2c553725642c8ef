"""Has JAX trace a step within a mesh: what specs without a mesh, and the types of values, refer to."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from mpmd.compat import mesh_of_refused_shard_map, with_lines_of_backward_rules
from mpmd.compiler.request import CompileRequest
from mpmd.ir.plan import Spec
from mpmd.ir.specs import axes_of, fitting
from mpmd.language.decisions import compiling
from mpmd.sharding import is_explicit, to_sharding, within

NO_MESH = AbstractMesh((), ())


def traced_within_submesh(request: CompileRequest) -> tuple[Any, Any]:
    """The jaxpr of a step for its arguments, and the shape of its result.

    It is traced within the first group's submesh. Within a mesh JAX refuses a ``shard_map`` over another
    one. A step that names a mesh of its own, as large as a group, is traced within that one, as it would be
    under plain JAX, or else within none, where ``shard_map``s and shardings may have different ones.
    """
    submeshes = request.submeshes

    def traced(mesh: AbstractMesh) -> tuple[Any, Any]:
        args, kwargs = _typed((request.args, dict(request.kwargs)), mesh, request.in_specs)
        with within(mesh), with_lines_of_backward_rules(), compiling():
            return jax.make_jaxpr(request.fun, return_shape=True)(*args, **kwargs)

    try:
        return traced(submeshes[0])
    except ValueError as error:
        names_mesh = "shard_map" in str(error)
        if is_explicit(submeshes[0]) and not names_mesh:
            raise
        refused_mesh = (
            mesh_of_refused_shard_map(functools.partial(traced, submeshes[0])) if names_mesh else None
        )
        sizes = {submesh.size for submesh in submeshes}
        meshes = (
            (refused_mesh.abstract_mesh, NO_MESH)
            if refused_mesh is not None and refused_mesh.size in sizes
            else (NO_MESH,)
        )
        for mesh in meshes:
            with contextlib.suppress(ValueError, RuntimeError):
                return traced(mesh)
        raise error from error.__cause__


def _typed(args: Any, mesh: AbstractMesh, specs: Sequence[Spec | None] | None) -> Any:
    """The arguments with their shardings in their types, if the mesh has explicit axes.

    A spec that does not fit is left out here, and refused where it is known which groups hold the value.

    Args:
      specs: how each leaf is sharded; ``None`` for one, or for all: replicated.
    """
    if not is_explicit(mesh):
        return args
    leaves, treedef = jax.tree.flatten(args)

    def typed(leaf: Any, spec: Spec | None) -> jax.ShapeDtypeStruct:
        shape, weak = jnp.shape(leaf), getattr(leaf, "weak_type", False)
        known = spec or () if axes_of(spec or ()) <= set(mesh.axis_names) else ()
        sharding = to_sharding(fitting(known, shape, mesh.shape), mesh)
        return jax.ShapeDtypeStruct(shape, jax.dtypes.result_type(leaf), weak_type=weak, sharding=sharding)

    typed_leaves = map(typed, leaves, specs or [None] * len(leaves))
    return jax.tree.unflatten(treedef, typed_leaves)
