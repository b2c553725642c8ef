"""The transport by TCP: connects processes, and sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.tcp import sockets
from cluster.tcp.credentials import Credentials
from cluster.transports.connections import ConnectedTransport
from cluster.transports.network.peer import Peer
from mpmd.runtime.transport import Array, MessageId


class NetworkTransport(ConnectedTransport[Peer]):
    """Exchanges messages with groups on any node, from host memory to host memory."""

    def listen(self, host: str, credentials: Credentials) -> sockets.Address:
        return self._listen_by_tcp(host, credentials)

    def connect(self, addresses: Mapping[int, sockets.Address]) -> None:
        """Raises: ``ConnectionError`` when a peer cannot be reached."""
        self._connect_by_tcp(
            addresses, lambda peer, connection: Peer(self._inbox, self._process, peer, connection)
        )

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        self._peers[message.dst].send(message, arrays)

    def trim(self) -> None:
        for peer in self._peers.values():
            peer.trim()
