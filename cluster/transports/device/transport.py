"""The transport by transfers between devices: connects groups, and sends."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from cluster.tcp import sockets
from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials
from cluster.transports.device.peer import DevicePeer
from cluster.transports.inbox import ProcessInbox
from cluster.transports.network.transport import ConnectedTransport
from mpmd.runtime.transport import Array, MessageId

_PACKET_BYTES = 16 * 1024
"""Messages up to this size whose arrays are in host memory are sent as they are, and not pulled."""

_CHUNK_BYTES = 4 * 2**20
_CHUNKS = 8


class DeviceAddress(NamedTuple):
    """The addresses of a group: its transfer server, and the socket that accepts connections."""

    server: str
    connections: sockets.Address


class DeviceTransport(ConnectedTransport[DevicePeer]):
    """Exchanges messages with groups on any node.

    Args:
      inbox: where the messages that arrive go.
      process: the number of this process.
      submesh: the group's devices; whole arrays go only to groups with a submesh of the same shape.
    """

    def __init__(self, inbox: ProcessInbox, process: int, submesh: jax.sharding.Mesh):
        super().__init__(inbox, process)
        self._submesh = submesh
        self._in_host_memory = submesh.devices.flat[0].platform == "cpu"
        self._numbers = itertools.count(secrets.randbits(62))

    def listen(self, host: str, credentials: Credentials) -> DeviceAddress:
        from jax.experimental import transfer  # not at the top: on some systems JAX does not have it

        self._server: Any = transfer.start_transfer_server(
            self._submesh.local_devices[0].client,
            f"{host}:0",
            [f"{host}:0"],
            max_num_parallel_copies=_CHUNKS,
            transfer_size=_CHUNK_BYTES,
        )
        return DeviceAddress(self._server.address(), super().listen(host, credentials))

    def connect(self, addresses: Mapping[int, DeviceAddress]) -> None:
        self._servers = {peer: each.server for peer, each in addresses.items()}
        super().connect({peer: each.connections for peer, each in addresses.items()})

    def _peer(self, process: int, connection: Connection) -> DevicePeer:
        pulling = self._server.connect(self._servers[process])
        return DevicePeer(
            self._inbox, self._process, process, connection, self._submesh, self._server, pulling
        )

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        peer = self._peers[message.dst]
        if self._in_host_memory and sum(array.nbytes for array in arrays) <= _PACKET_BYTES:
            peer.send(message, arrays)
        else:
            peer.offer(message, next(self._numbers), arrays)
