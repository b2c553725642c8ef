"""Messages as actor calls, through Ray's object store: works wherever Ray does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import jax
import numpy as np
import ray
from ray.actor import ActorHandle

from cluster.wire import Packed, pack, unpack
from mpmd.runtime.transport import Mailbox, MailboxReceipt, MessageId


class ObjectStoreTransport:
    """Implements ``mpmd.runtime.transport.Transport`` for one group actor.

    A message is one call of ``deliver`` on the actor of the receiving group. ``send`` returns once Ray has
    copied the arrays, and does not wait for them to arrive; its capacity is that of the object store. When
    a message cannot be delivered, the receiving group is told to abort the step, so it does not wait for
    it forever.
    """

    def __init__(self) -> None:
        self._mailbox: Mailbox[Sequence[Packed]] = Mailbox()
        self._peers: Sequence[ActorHandle] = ()
        self._sent: queue.SimpleQueue[tuple[MessageId, ray.ObjectRef] | None] = queue.SimpleQueue()

    def connect(self, peers: Sequence[ActorHandle]) -> None:
        """Hands over the actors of all groups, by ``mpmd_idx``. Must come before the first step."""
        self._peers = tuple(peers)
        threading.Thread(target=self._confirm_deliveries, name="deliveries", daemon=True).start()

    def send(self, message: MessageId, arrays: Sequence[jax.Array]) -> None:
        packed = [pack(array) for array in jax.device_get(list(arrays))]
        delivery: ray.ObjectRef = self._peers[message.dst].deliver.remote(message, packed)
        self._sent.put((message, delivery))

    def deliver(self, message: MessageId, packed: Sequence[Packed]) -> None:
        """Takes in a message; the peer's actor calls this, in any thread."""
        self._mailbox.deliver(message, packed)

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> MailboxReceipt:
        def place(arrived: Sequence[Packed]) -> Sequence[jax.Array]:
            # What arrived lies in Ray's memory, and device_put may alias host memory: copy.
            return jax.device_put([np.array(unpack(packed)) for packed in arrived], list(shardings))

        return MailboxReceipt(self._mailbox, message, place)

    def abort(self, step: int, reason: str) -> None:
        self._mailbox.abort(step, reason)

    def close(self) -> None:
        self._sent.put(None)

    def _confirm_deliveries(self) -> None:
        while (item := self._sent.get()) is not None:
            message, delivery = item
            try:
                ray.get(delivery)
            except Exception as error:
                reason = f"message {message.tag} of group {message.src} did not arrive: {error}"
                self._peers[message.dst].abort.remote(message.step, reason)
            del item, delivery  # an idle thread must not keep the last message in the object store
