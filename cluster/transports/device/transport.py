"""The transport by transfers between devices: connects groups, and sends."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from cluster.protocol.packing import pack
from cluster.tcp import sockets
from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials
from cluster.transports.connections import ConnectedTransport
from cluster.transports.device.peer import OfferedArray, OfferMessage, PacketMessage, Peer, offered_sharding
from cluster.transports.inbox import Inbox
from mpmd.ir.plan import Spec
from mpmd.runtime.transport import Array, MessageId
from mpmd.sharding import spec_of

_PACKET_BYTES = 16 * 1024
"""Messages up to this size whose arrays are in host memory are sent as they are, and not pulled."""

_CHUNK_BYTES = 4 * 2**20
_CHUNKS = 8


class DeviceAddress(NamedTuple):
    """The addresses of a group: its transfer server, and the socket that accepts connections."""

    server: str
    connections: sockets.Address


class DeviceTransport(ConnectedTransport[Peer]):
    """Exchanges messages with groups on any node.

    Args:
      inbox: where the messages that arrive go.
      process: the number of this process.
      submesh: the group's devices; whole arrays go only to groups with a submesh of the same shape.
    """

    def __init__(self, inbox: Inbox, process: int, submesh: jax.sharding.Mesh):
        super().__init__(inbox, process)
        self._submesh = submesh
        self._in_host_memory = submesh.devices.flat[0].platform == "cpu"
        self._numbers = itertools.count(secrets.randbits(62))

    def listen(self, host: str, credentials: Credentials) -> DeviceAddress:
        from jax.experimental import transfer  # not at the top: on some systems JAX does not have it

        self._server = transfer.start_transfer_server(
            self._submesh.local_devices[0].client,
            f"{host}:0",
            [f"{host}:0"],
            max_num_parallel_copies=_CHUNKS,
            transfer_size=_CHUNK_BYTES,
        )
        return DeviceAddress(self._server.address(), self._listen_by_tcp(host, credentials))

    def connect(self, addresses: Mapping[int, DeviceAddress]) -> None:
        """Raises: ``ConnectionError`` when a peer cannot be reached."""

        def peer_of(peer: int, connection: Connection) -> Peer:
            return Peer(
                inbox=self._inbox,
                submesh=self._submesh,
                here=self._process,
                process=peer,
                server=self._server.connect(addresses[peer].server),
                connection=connection,
            )

        self._connect_by_tcp({peer: each.connections for peer, each in addresses.items()}, peer_of)

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        peer = self._peers[message.dst]
        peer.wait_for_window(message.step)
        if self._in_host_memory and sum(array.nbytes for array in arrays) <= _PACKET_BYTES:
            peer.send(PacketMessage(message, tuple(pack(np.asarray(array)) for array in arrays)))
        else:
            peer.send(self._offer(message, arrays))

    def _offer(self, message: MessageId, arrays: Sequence[Array]) -> OfferMessage:
        number = next(self._numbers)
        specs = [self._spec_of(array) for array in arrays]
        # Copies, because the caller may donate what it has sent.
        shardings = [offered_sharding(spec, self._submesh) for spec in specs]
        offered = jax.device_put(list(arrays), shardings, may_alias=False)
        if pulled := [array for array in offered if array.nbytes]:  # the server never reports empty arrays
            self._server.await_pull(number, pulled)
        described = (OfferedArray(a.shape, a.dtype, spec) for a, spec in zip(offered, specs, strict=True))
        return OfferMessage(message, number, tuple(described))

    def _spec_of(self, array: Array) -> Spec | None:
        if isinstance(array, np.ndarray) or isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
            return None  # a part of a value, whose reader may have more devices
        return spec_of(array.sharding, self._submesh, array.ndim)
