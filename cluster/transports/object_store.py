"""Messages as actor calls, through Ray's object store. Works wherever Ray does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import ray
from ray.actor import ActorHandle

from cluster.protocol.packing import PackedArray, pack, unpack
from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials
from cluster.transports.inbox import ProcessInbox
from cluster.transports.peer_transport import MessageSender, PeerTransport
from mpmd.runtime.inbox import ArrayArrival
from mpmd.runtime.transport import Array, MessageId


class ObjectStoreTransport(PeerTransport):
    """Sends each message as one call of ``deliver`` on the actor of the receiving group.

    ``send`` returns when Ray has copied the arrays, and does not wait until they arrive; only the object
    store limits the messages on their way. When a message cannot be delivered, the receiving group is told to
    abort the step, so it does not wait for the message forever.
    """

    def __init__(self, inbox: ProcessInbox):
        super().__init__(inbox)
        self._peers: Mapping[int, ActorHandle] = {}
        self._sent: queue.SimpleQueue[tuple[MessageId, ray.ObjectRef] | None] = queue.SimpleQueue()

    def listen(self, host: str, credentials: Credentials) -> ActorHandle:
        return ray.get_runtime_context().current_actor

    def connect(
        self, addresses: Mapping[int, ActorHandle], connections: Mapping[int, Connection]
    ) -> Mapping[int, MessageSender]:
        self._peers = addresses
        threading.Thread(target=self._check_deliveries, name="deliveries", daemon=True).start()
        return dict.fromkeys(addresses, self)

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        packed = [pack(array) for array in jax.device_get(list(arrays))]
        delivery: ray.ObjectRef = self._peers[message.dst].deliver.remote(message, packed)
        self._sent.put((message, delivery))

    def deliver(self, message: MessageId, packed: Sequence[PackedArray]) -> None:
        """Takes a message; the peer's actor calls this, in any thread."""
        # Copies, because the arrays are in Ray's memory, and executables read host memory in place.
        self._inbox.add(message, ArrayArrival([np.array(unpack(each)) for each in packed]))
        self._inbox.wake()

    def close(self) -> None:
        self._sent.put(None)

    def _check_deliveries(self) -> None:
        while (item := self._sent.get()) is not None:
            message, delivery = item
            try:
                ray.get(delivery)
            except Exception as error:
                reason = (
                    f"message {message.tag} of {self._inbox.name_of(message.src)} did not arrive: {error}"
                )
                self._peers[message.dst].abort.remote(message.step, reason)
            del item, delivery  # an idle thread must not keep the last message in the object store
