"""Transports with a TCP connection to each peer, in both directions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from cluster.tcp import sockets
from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials
from cluster.transports.inbox import Inbox
from cluster.transports.peer_transport import PeerTransport

_CONNECT_SECONDS = 60


class ConnectedPeer(Protocol):
    """What speaks with a peer over its connection."""

    def start(self) -> None:
        """Begins to read."""

    def close(self) -> None:
        """Ends the connection."""


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
        self._listener = sockets.Listener(host)
        return self._listener.address

    def _connect_by_tcp(
        self, addresses: Mapping[int, sockets.Address], peer_of: Callable[[int, Connection], PeerT]
    ) -> None:
        """Raises: ``ConnectionError`` when a peer cannot be reached."""
        assert self._listener is not None, "connect comes after listen"
        connections = connect_peers(self._listener, self._credentials, self._process, addresses)
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
