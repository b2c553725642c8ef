"""The transport by TCP: connects processes, and sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.tcp import sockets
from cluster.tcp.credentials import Credentials
from cluster.transports.connections import connect_peers
from cluster.transports.inbox import Inbox
from cluster.transports.network.peer import Peer
from cluster.transports.peer_transport import PeerTransport
from mpmd.runtime.transport import Array, MessageId


class NetworkTransport(PeerTransport):
    """Exchanges messages with groups on any node, from host memory to host memory.

    Args:
      inbox: where the messages that arrive go.
      process: the number of this process.
    """

    def __init__(self, inbox: Inbox, process: int):
        super().__init__(inbox)
        self._process = process
        self._listener: sockets.Listener | None = None
        self._peers: dict[int, Peer] = {}

    def listen(self, host: str, credentials: Credentials) -> sockets.Address:
        self._credentials = credentials
        self._listener = sockets.Listener(host)
        return self._listener.address

    def connect(self, addresses: Mapping[int, sockets.Address]) -> None:
        """Raises: ``ConnectionError`` when a peer cannot be reached."""
        assert self._listener is not None, "connect comes after listen"
        connections = connect_peers(self._listener, self._credentials, self._process, addresses)
        self._peers = {
            peer: Peer(self._inbox, self._process, peer, connection)
            for peer, connection in connections.items()
        }
        for peer in self._peers.values():
            peer.start()

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        self._peers[message.dst].send(message, arrays)

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
