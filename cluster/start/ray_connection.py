"""Connects this process with Ray."""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable

import ray

from cluster.ray_compat import check_release, without_messages_to_user
from cluster.start.resources import live_nodes

_REACHABLE_SECONDS = 10

_users = set[object]()
"""The callers of ``connect_to_ray`` that use a connection made by this module."""


def connect_to_ray(address: str | None) -> Callable[[], None]:
    """Connects with Ray unless this process is connected. Returns the function by which the caller leaves.

    The last caller to leave ends the connection, if this module has made it.

    Raises: ``ConnectionError`` when there is no cluster at the address, ``RuntimeError`` when Ray is too old.
    """
    check_release()
    if not ray.is_initialized():
        _connect(address)
        _users.clear()  # somebody has shut down the Ray that they used
    elif not _users:
        return lambda: None
    user = object()
    _users.add(user)
    return functools.partial(_leave, user)


def _leave(user: object) -> None:
    if user in _users:
        _users.remove(user)
        if not _users:
            ray.shutdown()


def _connect(address: str | None) -> None:
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        _join_cluster(address)
    else:
        with without_messages_to_user():
            # By default workers run at niceness 15: the driver, or any other program, comes before them.
            niceness = int(os.environ.get("RAY_worker_niceness", "0"))  # noqa: SIM112
            ray.init(address="local", include_dashboard=False, _system_config={"worker_niceness": niceness})
        cpus = ray.cluster_resources().get("CPU", 0)
        print(
            f"mpmd.launch: not connected to a Ray cluster; started Ray on this machine, {cpus:g} CPUs",
            file=sys.stderr,
        )


def _join_cluster(address: str) -> None:
    check_reachable(address)
    try:
        with without_messages_to_user():
            ray.init(address=address)
    except ConnectionError as error:
        hint = ""
        if "RAY_AUTH_MODE" not in os.environ:
            hint = (
                ". If the cluster uses token authentication, as it may by default, set RAY_AUTH_MODE=token "
                "and have its token in ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            )
        raise ConnectionError(f"no connection to the Ray cluster at {address}: {error}{hint}") from error


def check_reachable(address: str) -> None:
    """Raises ``ConnectionError`` for a ``host:port`` where nothing listens: Ray would try it for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REACHABLE_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ConnectionError(
                f"no Ray cluster at {address}, where nothing can be reached: {error}. `ray status` shows the "
                "cluster that runs on a machine; launch's address or RAY_ADDRESS says which one to join"
            ) from error


def default_platform() -> str:
    return "cuda" if any(node["Resources"].get("GPU") for node in live_nodes()) else "cpu"
