"""A TCP connection to each peer, in both directions, for transports that need one."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Mapping

from cluster import sockets

_HELLO = struct.Struct("<i")  # the process that connects

_CONNECT_SECONDS = 60


def connect_peers(
    listener: sockets.Listener, secret: bytes, process: int, addresses: Mapping[int, sockets.Address]
) -> dict[int, socket.socket]:
    """Connects with every peer. All of them have to call this; it closes the listener.

    Args:
      listener: what this process listens at.
      process: the number of this process.
      addresses: where each of the others listens.

    Raises: ``ConnectionError`` when a peer cannot be reached, or the listener is interrupted; then there are
      no connections.
    """
    # Each connects to the later ones, the last first. That one accepts at once, so processes do not wait for
    # one another in a chain.
    later = sorted((peer for peer in addresses if peer > process), reverse=True)
    connections: dict[int, socket.socket] = {}
    with listener, contextlib.ExitStack() as undo:
        for peer in later:
            tcp = undo.enter_context(sockets.connect(addresses[peer], secret, _CONNECT_SECONDS))
            tcp.sendall(_HELLO.pack(process))
            connections[peer] = tcp
        while connections.keys() != addresses.keys():
            tcp = undo.enter_context(listener.accept(secret))
            hello = tcp.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) < _HELLO.size:
                raise ConnectionError("a group has closed its connection as soon as it was made")
            (peer,) = _HELLO.unpack(hello)
            connections[peer] = tcp
        undo.pop_all()
    return connections
