"""What JAX has no public name for, or says differently in different versions.

Nothing else in the project reaches below JAX's public modules.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr
from jax.sharding import AbstractMesh, Mesh

NAMELESS = DebugInfo("mpmd", "mpmd", None, None)
"""For jaxprs whose arguments and results are no longer those of a user's function."""


def with_constants_as_inputs(closed: ClosedJaxpr) -> Jaxpr:
    """The jaxpr with its constants as its first inputs.

    Before JAX 0.12 the constants of a ``Jaxpr`` need no values; since then every constant has one.
    """
    jaxpr = closed.jaxpr
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=invars, debug_info=NAMELESS)


def current_context() -> Any:
    """What an equation that is traced here keeps of JAX's settings; equations have no public constructor."""
    return jax.make_jaxpr(jax.lax.neg)(0.0).eqns[0].ctx


def mesh_of_refused_shard_map(trace: Callable[[], Any]) -> Any:
    """The mesh that a user's ``jax.shard_map`` names, if JAX refuses it while ``trace`` traces a function.

    JAX names the mesh in the text of the error alone, and leaves its own frames out of tracebacks.
    """
    mode = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        trace()
    except ValueError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    else:
        frames = []
    finally:
        jax.config.update("jax_traceback_filtering", mode)
    named = (f.f_locals.get("mesh") for f in frames if f.f_code.co_filename.endswith("shard_map.py"))
    return next((mesh for mesh in named if isinstance(mesh, Mesh | AbstractMesh)), None)


def key_impl_name(dtype) -> str:
    """The name of the random number generator of a key dtype, as ``jax.random.wrap_key_data`` takes it.

    ``jax.random.key_impl`` answers this for arrays only, not for the abstract values of a jaxpr.
    """
    return key_impl(dtype).name


def key_impl(dtype):
    """The random number generator of a key dtype, which ``jax.random`` reads from key arrays."""
    return dtype._impl


def use_cpu_collectives_at(host: str) -> None:
    """Has the collectives of CPU devices listen at an address of this process.

    To be called before ``jax.distributed.initialize``. JAX has them listen where the host's name resolves to,
    often a loopback address that other nodes cannot reach, and has no public option for it.
    """
    from jax._src import distributed, xla_bridge
    from jaxlib import _jax

    def make_client():
        world = distributed.global_state.client
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=world, hostname=host)
        return xla_bridge.make_cpu_client(collectives)

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def register_array_type(array_type: type, values_of: Callable[[Sequence[Any]], Sequence[jax.Array]]) -> None:
    """Has JAX's functions take instances of a subclass of ``jax.Array``, which they only know by its value.

    JAX finds what it needs to know of an argument by the argument's type, and has no public way to add one
    that is no pytree: the abstract value, the value in JAX's own types, and the value as a constant.

    Args:
      array_type: its instances have ``shape``, ``dtype`` and ``weak_type``.
      values_of: the values of several instances as JAX's own arrays.
    """
    from jax._src import core, dtypes
    from jax._src.interpreters import mlir, pxla

    def abstract_value(array: Any) -> Any:
        return core.ShapedArray(array.shape, array.dtype, weak_type=array.weak_type)

    def arguments(arrays: Any, shardings: Any, layouts: Any, copy_semantics: Any) -> Any:
        return pxla.shard_args(shardings, layouts, copy_semantics, values_of(arrays))

    def constant(val: Any, aval: Any) -> Any:
        (value,) = values_of([val])
        return mlir.get_constant_handler(type(value))(value, aval)

    core.pytype_aval_mappings[array_type] = abstract_value
    dtypes.register_canonicalize_value_handler(array_type, None)
    pxla.shard_arg_handlers[array_type] = arguments
    mlir.register_constant_handler(array_type, constant)
