"""The processes of a group as a ``jax.distributed`` world, so that XLA's collectives reach every process."""

from __future__ import annotations

import socket

import jax

from mpmd.compat import use_cpu_collectives_at

Address = tuple[str, int]
"""Host and port."""

_HEARTBEAT_SECONDS = 120
"""The driver notices earlier that a process hangs, and then ends the group."""

_SHUTDOWN_SECONDS = 5
"""The seconds that a process that ends waits for its group's other processes to end."""

_MARGIN_SECONDS = 30
"""The seconds for which JAX waits longer than the driver, so that the driver reports the fault.

JAX would only end the process.
"""


class WorldLostError(RuntimeError):
    """The processes of a group do not reach one another any more."""


def reserve_port() -> socket.socket:
    """A socket that keeps a port of this machine free for the coordinator, until the caller closes it.

    The coordinator can listen there meanwhile, because it shares ports, but no other socket like this gets
    the port. Of two coordinators at one port, each would take processes of the other's world.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("", 0))
    return holder


def check_free(address: Address) -> None:
    """Checks that no program has the port at which a coordinator of this machine is to listen.

    JAX may end the process when it cannot listen; and where another program shares the port, too, processes
    of one world could meet the coordinator of another one. A socket of ``reserve_port`` does not count.

    Raises: ``RuntimeError`` when there is one.
    """
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(address)
        with socket.socket() as probe:
            if probe.connect_ex(address) != 0:
                return
        reason = "it answers"
    except OSError as error:
        reason = str(error)
    host, port = address
    raise RuntimeError(
        f"the processes of a group cannot meet at {host}:{port}, which another program has: {reason}"
    )


def join(coordinator: Address, num_processes: int, rank: int, host: str, timeout: float) -> None:
    """Joins the world of a group; to be called before JAX looks for devices. Rank 0 is the coordinator.

    Neither the coordinator's port nor the port of the collectives asks for a certificate: JAX has no way to.

    Args:
      coordinator: the address at which rank 0 listens.
      num_processes: the number of processes of the group.
      rank: the rank of this process.
      host: the address of this process for the collectives of CPU devices.
      timeout: seconds to wait for the other processes.

    Raises: ``RuntimeError`` when the coordinator cannot listen. When another process does not come, JAX ends
      this process.
    """
    if rank == 0:
        check_free(coordinator)
    # Otherwise the process would outlive a SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    use_cpu_collectives_at(host)
    address = f"{coordinator[0]}:{coordinator[1]}"
    try:
        jax.distributed.initialize(
            address,
            num_processes,
            rank,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address,  # by default it would listen at every address of the node
            initialization_timeout=int(timeout) + _MARGIN_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"process {rank} cannot join the {num_processes} processes of its group at {address}: {error}"
        ) from error


def is_lost(error: BaseException | None) -> bool:
    """Whether a task's error says that the processes of its group do not reach one another any more.

    JAX raises ``ValueError`` for some of the failures of collectives, as when an all-gather loses a process.
    """
    signs = ("Gloo", "coordination service")
    of_jax = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    return of_jax and any(sign in str(error) for sign in signs)
