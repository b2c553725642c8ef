"""The transport by TCP: connects processes."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from cluster.tcp import sockets
from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials
from cluster.transports.connections import connect_peers
from cluster.transports.inbox import ProcessInbox
from cluster.transports.network.peer import Peer
from cluster.transports.peer_transport import MessageSender, PeerTransport

PeerT = TypeVar("PeerT", bound=Peer)


class ConnectedTransport(PeerTransport, Generic[PeerT]):
    """A ``PeerTransport`` that has a TCP connection to each peer, by the number of its process.

    Args:
      inbox: where the messages that arrive go.
      process: the number of this process.
    """

    def __init__(self, inbox: ProcessInbox, process: int):
        super().__init__(inbox)
        self._process = process
        self._listener: sockets.Listener | None = None
        self._peers: dict[int, PeerT] = {}

    @abc.abstractmethod
    def _peer(self, process: int, connection: Connection) -> PeerT: ...

    def listen(self, host: str, credentials: Credentials) -> Any:
        self._listener = sockets.Listener(host, credentials)
        return self._listener.address

    def connect(self, addresses: Mapping[int, Any]) -> Mapping[int, MessageSender]:
        """Raises: ``ConnectionError`` when a peer cannot be reached."""
        assert self._listener is not None, "connect comes after listen"
        connections = connect_peers(self._listener, sockets.connect, self._process, addresses)
        self._peers = {peer: self._peer(peer, connection) for peer, connection in connections.items()}
        for connected in self._peers.values():
            connected.start()
        return self._peers

    def trim(self) -> None:
        for peer in self._peers.values():
            peer.trim()

    def interrupt(self) -> None:
        if self._listener is not None:
            self._listener.interrupt()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for peer in self._peers.values():
            peer.close()


class NetworkTransport(ConnectedTransport[Peer]):
    """Exchanges messages with groups on any node, from host memory to host memory."""

    def _peer(self, process: int, connection: Connection) -> Peer:
        return Peer(self._inbox, self._process, process, connection)
