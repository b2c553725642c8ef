"""Connects a process with all its peers, each by a connection of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from cluster.tcp.credentials import Credentials
from cluster.tcp.listener import LinkT, Listener

CONNECT_SECONDS = 60
"""The most that a peer may be late, once this process connects."""

AddressT = TypeVar("AddressT")


def connect_peers(
    listener: Listener[LinkT],
    connect: Callable[[AddressT, Credentials, float, int, Callable[[], None]], LinkT],
    process: int,
    addresses: Mapping[int, AddressT],
    others: Collection[int] = (),
) -> dict[int, LinkT]:
    """Connects with every peer. All peers have to call this function, which closes the listener.

    Args:
      listener: the listener of this process. Its interruption ends all waits here.
      connect: connects with a listener of that kind.
      process: the number of this process.
      addresses: where each peer listens, by the peer's number.
      others: the numbers of processes without an address, which connect with this process.

    Raises: ``ConnectionError`` when a peer cannot be reached, or the listener is interrupted; then there are
      no connections.
    """
    # Each connects to the later ones, the last first. That one accepts at once, so processes do not wait for
    # one another in a chain.
    later = sorted((peer for peer in addresses if peer > process), reverse=True)
    connections: dict[int, LinkT] = {}
    with listener, contextlib.ExitStack() as undo:
        for peer in later:
            connections[peer] = connect(
                addresses[peer], listener.credentials, CONNECT_SECONDS, process, listener.check
            )
            undo.callback(connections[peer].close)
        while connections.keys() != {*addresses, *others}:
            peer, connection = listener.accept()
            undo.callback(connection.close)
            connections[peer] = connection
        undo.pop_all()
    return connections
