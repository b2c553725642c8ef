"""Transports that connect a process with all its peers, each by a connection of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from cluster.tcp.credentials import Credentials
from cluster.tcp.listener import LinkT, Listener
from cluster.transports.inbox import ProcessInbox
from cluster.transports.peer_transport import PeerTransport

CONNECT_SECONDS = 60
"""The most that a peer may be late, once this process connects."""

AddressT = TypeVar("AddressT")


class ConnectedTransport(PeerTransport, Generic[LinkT]):
    """A ``PeerTransport`` that has a connection to each peer. ``listen`` has to make the listener."""

    def __init__(self, inbox: ProcessInbox, process: int):
        super().__init__(inbox)
        self._process = process
        self._listener: Listener[LinkT] | None = None

    @property
    def _listening(self) -> Listener[LinkT]:
        assert self._listener is not None, "connect comes after listen"
        return self._listener

    def interrupt(self) -> None:
        if self._listener is not None:
            self._listener.interrupt()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


def connect_peers(
    listener: Listener[LinkT],
    connect: Callable[[AddressT, Credentials, float, int, Callable[[], None]], LinkT],
    process: int,
    addresses: Mapping[int, AddressT],
) -> dict[int, LinkT]:
    """Connects with every peer. All peers have to call this; it closes the listener.

    Args:
      listener: the listener of this process. Its interruption ends all waits here.
      connect: connects with a listener of that kind.
      process: the number of this process.
      addresses: where each peer listens, by the peer's number.

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
        while connections.keys() != addresses.keys():
            peer, connection = listener.accept()
            undo.callback(connection.close)
            connections[peer] = connection
        undo.pop_all()
    return connections
