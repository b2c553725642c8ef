"""Joins several transports: each message goes by the transport that connects its two processes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from cluster.protocol.endpoint import DRIVER, Endpoint
from cluster.protocol.packing import PackedArray
from cluster.tcp import sockets
from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials
from cluster.transports.choice import DEVICE, NETWORK, OBJECT_STORE, SHARED_MEMORY, TCP
from cluster.transports.connections import connect_peers
from cluster.transports.device.transport import DeviceTransport
from cluster.transports.inbox import PeerLostError, ProcessInbox
from cluster.transports.network.transport import NetworkTransport
from cluster.transports.object_store import ObjectStoreTransport
from cluster.transports.peer_transport import MessageSender, PeerTransport
from cluster.transports.shared_memory.transport import SharedMemoryTransport
from mpmd.runtime.transport import Array, MessageId


class Router:
    """Implements ``mpmd.runtime.transport.Transport`` for one process, by one transport for each peer.

    It also makes all TCP connections of the process: with peers, for their transports, with the processes of
    its own group, and with the driver.
    """

    def __init__(self, endpoint: Endpoint, submesh: jax.sharding.Mesh):
        self._endpoint = endpoint
        self._submesh = submesh
        self._make_transports()

    def _make_transports(self) -> None:
        process = self._endpoint.number
        self._inbox = ProcessInbox(self._endpoint.name_of, self._endpoint.group_of)
        self._object_store = ObjectStoreTransport(self._inbox)
        self._transports: dict[str, PeerTransport] = {
            SHARED_MEMORY: SharedMemoryTransport(self._inbox, process),
            NETWORK: NetworkTransport(self._inbox, process),
            DEVICE: DeviceTransport(self._inbox, process, self._submesh),
            OBJECT_STORE: self._object_store,
        }
        self._senders: dict[int, MessageSender] = {}  # by peer
        self._listener: sockets.ConnectionListener | None = None
        self._connections: dict[int, Connection] = {}

    def listen(self, names: Iterable[str], host: str, credentials: Credentials) -> dict[str, Any]:
        """Opens a port for each name, of a transport or ``TCP``. Returns the addresses, by name."""
        if self._inbox.is_closed:
            self._make_transports()
        addresses: dict[str, Any] = {}
        for name in names:
            if name == TCP:
                self._listener = sockets.ConnectionListener(host, credentials)
                addresses[TCP] = self._listener.address
            else:
                addresses[name] = self._transports[name].listen(host, credentials)
        return addresses

    def connect(
        self, routes: Mapping[int, str], addresses: Sequence[Mapping[str, Any]], others: Collection[int] = ()
    ) -> dict[int, Connection]:
        """Connects with peers and others. Returns the connection with each of ``others``.

        Args:
          routes: the transport of each peer.
          addresses: the result of ``listen`` for each process.
          others: the processes of this group to connect with, and ``DRIVER`` if the driver connects.

        Raises: ``ConnectionError`` when a process cannot be reached.
        """
        by_tcp = {*others, *(peer for peer, name in routes.items() if name in (NETWORK, DEVICE))}
        if self._listener is not None:
            known = {peer: addresses[peer][TCP] for peer in by_tcp - {DRIVER}}
            self._connections = connect_peers(
                self._listener, sockets.connect, self._endpoint.number, known, by_tcp & {DRIVER}
            )
        assert self._connections.keys() == by_tcp, "whoever is connected by TCP has listened by TCP"
        for name, transport in self._transports.items():
            if peers := {peer: addresses[peer][name] for peer, chosen in routes.items() if chosen == name}:
                self._senders |= transport.connect(peers, self._connections)
        return {other: self._connections[other] for other in others}

    @property
    def lost(self) -> PeerLostError | None:
        return self._inbox.lost

    def begin_step(self, step: int, groups: Collection[int] | None = None) -> None:
        """Begins a step: the group will not run an earlier step any more. The numbers of steps ascend.

        ``groups`` are the groups that take part; by default, all.
        """
        self._inbox.begin_step(step, groups)
        for transport in self._transports.values():
            transport.begin_step(step)

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        self._senders[message.dst].send(message, arrays)

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        return self._inbox.take(message).open(shardings)

    @property
    def arrived(self) -> int:
        return self._inbox.arrived

    def deliver(self, message: MessageId, packed: Sequence[PackedArray]) -> None:
        self._object_store.deliver(message, packed)

    def abort(self, step: int, reason: str) -> None:
        self._inbox.abort(step, reason)

    def trim(self) -> None:
        for transport in self._transports.values():
            transport.trim()

    def interrupt(self) -> None:
        if self._listener is not None:
            self._listener.interrupt()
        for transport in self._transports.values():
            transport.interrupt()

    def close(self) -> None:
        """Ends all connections, those of ``others`` too, complete or not; then ``listen`` makes new ones.

        Those who hold this object, such as loaded programs, use the new ones. No thread may send or wait.
        """
        if self._inbox.is_closed:
            return
        if self._listener is not None:
            self._listener.close()
        for transport in self._transports.values():
            transport.close()
        for connection in self._connections.values():
            connection.end()  # a process of this group that waits for this one's vote ends its step
            connection.close()
        self._inbox.close()
