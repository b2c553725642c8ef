"""The transport by TCP: connects processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.tcp.connection import Connection
from cluster.transports.device.transfers import Transfers
from cluster.transports.inbox import ProcessInbox
from cluster.transports.network.peer import Peer
from cluster.transports.peer_transport import MessageSender, PeerTransport


class NetworkTransport(PeerTransport):
    """Exchanges messages with groups on any node, from host memory to host memory."""

    def __init__(self, inbox: ProcessInbox, process: int):
        super().__init__(inbox)
        self._process = process
        self._peers: dict[int, Peer] = {}

    def _transfers(self, process: int) -> Transfers | None:
        """Transfers between the devices of both groups, in place of messages in host memory."""
        return None

    def connect(
        self, addresses: Mapping[int, Any], connections: Mapping[int, Connection]
    ) -> Mapping[int, MessageSender]:
        self._peers = {
            peer: Peer(self._inbox, self._process, peer, connections[peer], self._transfers(peer))
            for peer in addresses
        }
        for connected in self._peers.values():
            connected.start()
        return self._peers

    def begin_step(self, step: int) -> None:
        for peer in self._peers.values():
            peer.confirm()

    def trim(self) -> None:
        for peer in self._peers.values():
            peer.trim()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
