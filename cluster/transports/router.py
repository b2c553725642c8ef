"""Joins several transports: each message goes by the transport that connects its two processes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from cluster.protocol.endpoint import Endpoint
from cluster.protocol.packing import PackedArray
from cluster.tcp.credentials import Credentials
from cluster.transports.choice import DEVICE, NETWORK, OBJECT_STORE, SHARED_MEMORY
from cluster.transports.device.transport import DeviceTransport
from cluster.transports.inbox import PeerLostError, ProcessInbox
from cluster.transports.network.transport import NetworkTransport
from cluster.transports.object_store import ObjectStoreTransport
from cluster.transports.peer_transport import MessageSender, PeerTransport
from cluster.transports.shared_memory.transport import SharedMemoryTransport
from mpmd.runtime.transport import Array, MessageId


class Router:
    """Implements ``mpmd.runtime.transport.Transport`` for one process, by one transport for each peer."""

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

    def listen(self, names: Iterable[str], host: str, credentials: Credentials) -> dict[str, Any]:
        if self._inbox.is_closed:
            self._make_transports()
        return {name: self._transports[name].listen(host, credentials) for name in names}

    def connect(self, routes: Mapping[int, str], addresses: Sequence[Mapping[str, Any]]) -> None:
        """``addresses`` has the result of ``listen`` for each process."""
        for name, transport in self._transports.items():
            if peers := [peer for peer, chosen in routes.items() if chosen == name]:
                self._senders |= transport.connect({peer: addresses[peer][name] for peer in peers})

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
        for transport in self._transports.values():
            transport.interrupt()

    def close(self) -> None:
        """Ends all connections, whether they are complete or not; then ``listen`` makes new ones.

        Those who hold this object, such as loaded programs, use the new ones. No thread may send or wait.
        """
        if self._inbox.is_closed:
            return
        for transport in self._transports.values():
            transport.close()
        self._inbox.close()
