"""The processes of a group as a ``jax.distributed`` world, so that XLA's collectives reach all of them."""

from __future__ import annotations

import socket

import jax

from cluster.sockets import Address
from mpmd.compat import use_cpu_collectives_at

_HEARTBEAT_SECONDS = 120
"""The driver notices earlier that a process hangs, and then ends the group."""

_SHUTDOWN_SECONDS = 5


def free_port() -> int:
    """A port of this machine that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def join(coordinator: Address, num_processes: int, rank: int, host: str, timeout: float) -> None:
    """Joins the world of a group; to be called before JAX looks for devices. Rank 0 is the coordinator.

    Neither the coordinator's port nor that of the collectives asks for a secret: JAX has no way to.

    Args:
      host: the address of this process for the collectives of CPU devices.
      timeout: seconds to wait for the other processes.

    Raises: ``RuntimeError`` when they do not come, or the coordinator's port is taken.
    """
    # Otherwise the process would outlive a SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    use_cpu_collectives_at(host)
    address = f"{coordinator[0]}:{coordinator[1]}"
    jax.distributed.initialize(
        address,
        num_processes,
        rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,  # by default it would listen at every address of the node
        initialization_timeout=int(max(timeout, 1)),
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )


def is_broken(error: BaseException) -> bool:
    """Whether the error says that the processes of a group do not reach one another any more."""
    return any(sign in str(error) for sign in ("Gloo", "gloo", "collective", "coordination service"))
