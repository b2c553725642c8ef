"""What JAX has no public name for, or says differently in different versions.

Nothing else in the project reaches below JAX's public modules.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
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
    return dtype._impl.name


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
