"""The transport by transfers between devices: connects groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials
from cluster.transports.device.transfers import Transfers
from cluster.transports.inbox import ProcessInbox
from cluster.transports.network.transport import NetworkTransport
from cluster.transports.peer_transport import MessageSender

_CHUNK_BYTES = 4 * 2**20
_CHUNKS = 8


class DeviceTransport(NetworkTransport):
    """Exchanges messages with groups on any node; whole arrays only with groups of an equal submesh."""

    def __init__(self, inbox: ProcessInbox, process: int, submesh: jax.sharding.Mesh):
        super().__init__(inbox, process)
        self._submesh = submesh

    def listen(self, host: str, credentials: Credentials) -> str:
        from jax.experimental import transfer  # not at the top: on some systems JAX does not have it

        self._server: Any = transfer.start_transfer_server(
            self._submesh.local_devices[0].client,
            f"{host}:0",
            [f"{host}:0"],
            max_num_parallel_copies=_CHUNKS,
            transfer_size=_CHUNK_BYTES,
        )
        return self._server.address()

    def connect(
        self, addresses: Mapping[int, str], connections: Mapping[int, Connection]
    ) -> Mapping[int, MessageSender]:
        self._servers = addresses
        return super().connect(addresses, connections)

    def _transfers(self, process: int) -> Transfers:
        return Transfers(self._submesh, self._server, self._server.connect(self._servers[process]))
