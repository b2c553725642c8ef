"""What JAX has no public name for, or says differently in different versions.

Nothing else in the project reaches below JAX's public modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

import jax
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


# A step is traced and lowered within its group's mesh and for its devices, whatever those of the caller are.
_OF_DEVICES = frozenset(
    """abstract_mesh_context_manager mesh_context_manager jax_default_device jax_disable_jit""".split()
)


def trace_context() -> Hashable:
    """What JAX's configuration says in this thread about how functions are traced and lowered.

    What is traced under one such value must not be used under another: it is a part of the key under which
    ``jax.jit`` keeps functions, and has no public name. Added is the kind of key that
    ``jax.random.PRNGKey`` makes, which ``jax.jit`` forgets.
    """
    from jax._src import config

    named = zip(config.trace_context_names(), config.trace_context(), strict=True)
    impl = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]
    return (impl, *(value for name, value in named if name not in _OF_DEVICES))


def trace_context_for_threads() -> Callable[[], AbstractContextManager]:
    """What makes contexts in which this thread's ``trace_context`` holds in another thread.

    JAX keeps the values of its contexts, such as ``jax.threefry_partitionable``, for each thread, and lowers
    under those of the thread that compiles.
    """
    from jax._src import config

    names = frozenset(config.trace_context_names()) - _OF_DEVICES
    own = [
        (state, state.value)
        for name, state in config.config_states.items()
        if name in names and state.value != state.get_global()
    ]

    def enter() -> AbstractContextManager:
        held = contextlib.ExitStack()
        for state, value in own:
            held.enter_context(state(value))
        return held

    return enter


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
