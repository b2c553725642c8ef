"""Transports with a TCP connection to each peer, in both directions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from cluster.tcp import sockets
from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials
from cluster.tcp.listener import LinkT, Listener
from cluster.transports.inbox import Inbox
from cluster.transports.peer_transport import PeerTransport

CONNECT_SECONDS = 60
"""The most that a peer may be late, once this process connects."""


class ConnectedPeer(Protocol):
    """Speaks with a peer over its connection."""

    def start(self) -> None:
        """Begins to read."""

    def close(self) -> None:
        """Ends the connection."""


AddressT = TypeVar("AddressT")
PeerT = TypeVar("PeerT", bound=ConnectedPeer)


class ConnectedTransport(PeerTransport, Generic[PeerT]):
    """A ``PeerTransport`` that has an object for each peer, by the number of its process.

    Args:
      inbox: where the messages that arrive go.
      process: the number of this process.
    """

    def __init__(self, inbox: Inbox, process: int):
        super().__init__(inbox)
        self._process = process
        self._listener: sockets.Listener | None = None
        self._peers: dict[int, PeerT] = {}

    def _listen_by_tcp(self, host: str, credentials: Credentials) -> sockets.Address:
        self._credentials = credentials
        self._listener = sockets.Listener(host, credentials)
        return self._listener.address

    def _connect_by_tcp(
        self, addresses: Mapping[int, sockets.Address], peer_of: Callable[[int, Connection], PeerT]
    ) -> None:
        """Connects with every peer. Raises: ``ConnectionError`` when a peer cannot be reached."""
        assert self._listener is not None, "connect comes after listen"
        connections = connect_peers(
            self._listener, sockets.connect, self._credentials, self._process, addresses
        )
        self._peers = {peer: peer_of(peer, connection) for peer, connection in connections.items()}
        for connected in self._peers.values():
            connected.start()

    def interrupt(self) -> None:
        if self._listener is not None:
            self._listener.interrupt()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for peer in self._peers.values():
            peer.close()


def connect_peers(
    listener: Listener[LinkT],
    connect: Callable[[AddressT, Credentials, float, int, Callable[[], None]], LinkT],
    credentials: Credentials,
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
                addresses[peer], credentials, CONNECT_SECONDS, process, listener.check
            )
            undo.callback(connections[peer].close)
        while connections.keys() != addresses.keys():
            peer, connection = listener.accept()
            undo.callback(connection.close)
            connections[peer] = connection
        undo.pop_all()
    return connections
