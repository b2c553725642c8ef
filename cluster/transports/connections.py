"""A TCP connection to each peer, in both directions, for transports that need one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from cluster.tcp import sockets
from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials

_CONNECT_SECONDS = 60


def connect_peers(
    listener: sockets.Listener,
    credentials: Credentials,
    process: int,
    addresses: Mapping[int, sockets.Address],
) -> dict[int, Connection]:
    """Connects with every peer. All of them have to call this; it closes the listener.

    Args:
      listener: what this process listens at. To interrupt it ends all waiting here.
      process: the number of this process.
      addresses: where each of the others listens.

    Raises: ``ConnectionError`` when a peer cannot be reached, or the listener is interrupted; then there are
      no connections.
    """
    # Each connects to the later ones, the last first. That one accepts at once, so processes do not wait for
    # one another in a chain.
    later = sorted((peer for peer in addresses if peer > process), reverse=True)
    connections: dict[int, Connection] = {}
    with listener, contextlib.ExitStack() as undo:
        for peer in later:
            connections[peer] = undo.enter_context(
                sockets.connect(addresses[peer], credentials, _CONNECT_SECONDS, process, listener.check)
            )
        while connections.keys() != addresses.keys():
            peer, connection = listener.accept(credentials)
            connections[peer] = undo.enter_context(connection)
        undo.pop_all()
    return connections
