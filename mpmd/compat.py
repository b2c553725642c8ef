"""What JAX has no public name for, or says differently in different versions.

Nothing else in the project reaches below JAX's public modules.
"""

from __future__ import annotations

from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr

NAMELESS = DebugInfo("mpmd", "mpmd", None, None)
"""For jaxprs whose arguments and results are no longer those of a user's function."""


def with_constants_as_inputs(closed: ClosedJaxpr) -> Jaxpr:
    """The jaxpr with its constants as its first inputs.

    Before JAX 0.12 the constants of a ``Jaxpr`` need no values; since then every constant has one.
    """
    jaxpr = closed.jaxpr
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=invars, debug_info=NAMELESS)


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
