"""The connection between this group and a group that it exchanges messages with by transfers."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cluster.protocol.digests import CorruptedError
from cluster.protocol.packing import PackedArray, unpack
from cluster.tcp.connection import Connection
from cluster.tcp.frames import FrameConnection, encode
from cluster.transports.inbox import Inbox
from cluster.transports.window import SendWindow
from mpmd.ir.plan import Spec
from mpmd.runtime.transport import MessageId
from mpmd.sharding import to_sharding

_DETECTION_SECONDS = 1.0
"""Within this time of a failed pull it is known whether the peer's connection has ended."""


class OfferedArray(NamedTuple):
    """An array at the sender's transfer server.

    ``spec`` holds over either group's submesh; ``None``: the array is on one device.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: Spec | None


class OfferMessage(NamedTuple):
    """Announces a message whose arrays can be pulled from the sender's transfer server by ``number``."""

    message: MessageId
    number: int
    arrays: tuple[OfferedArray, ...]


class PacketMessage(NamedTuple):
    """A small message with its arrays."""

    message: MessageId
    arrays: tuple[PackedArray, ...]


def offered_sharding(spec: Spec | None, submesh: jax.sharding.Mesh) -> jax.sharding.Sharding:
    """The sharding of an offered array at either end."""
    if spec is None:
        return jax.sharding.SingleDeviceSharding(submesh.local_devices[0])
    return to_sharding(spec, submesh)


_CONFIRMATION = None
"""The receiver's answer to each message that was received or dropped."""


class Peer:
    """The connection to one group, in both directions, with a thread that reads and one that confirms.

    Args:
      inbox: where the messages that arrive go, and where senders wait.
      submesh: this group's devices.
      here: the number of this process.
      process: the number of the peer's process.
      server: the connection to the peer's transfer server.
      connection: the connection to the peer, which ``close`` closes.
    """

    def __init__(
        self,
        inbox: Inbox,
        submesh: jax.sharding.Mesh,
        here: int,
        process: int,
        server: Any,
        connection: Connection,
    ):
        self._inbox = inbox
        self._here = here
        self._process = process
        self._submesh = submesh
        self._server = server
        self._connection = FrameConnection(connection)
        self._writing = threading.Lock()
        self._window = SendWindow()
        self._num_confirmed = 0
        self._confirmations: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._disconnected = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"from {process}", daemon=True)
        self._confirmer = threading.Thread(target=self._confirm, name=f"to {process}", daemon=True)

    def start(self) -> None:
        """Starts the threads."""
        self._reader.start()
        self._confirmer.start()

    def wait_for_window(self, step: int) -> None:
        """Waits until a message of ``step`` may be sent. Raises ``StepAborted``."""
        self._window.begin(step)
        self._inbox.wait(step, lambda: self._window.is_open(self._num_confirmed))

    def send(self, content: PacketMessage | OfferMessage) -> None:
        """Raises: ``StepAborted`` when the peer is gone."""
        if self._disconnected.is_set() or not self._try_send(content):
            self.wait_for_abort(content.message.step)
        self._window.count_sent()

    def wait_for_abort(self, step: int) -> None:
        """Waits for the reason why the peer is gone. Raises ``StepAborted``."""
        self._inbox.wait(step, lambda: False)

    def name_of(self, process: int) -> str:
        """A process's name in messages to users."""
        return self._inbox.name_of(process)

    def confirm(self) -> None:
        """Confirms a message, in a thread of its own: the caller must not wait until the peer reads."""
        self._confirmations.put(True)

    def _confirm(self) -> None:
        while self._confirmations.get():
            self._try_send(_CONFIRMATION)  # a peer that is gone does not need it

    def _try_send(self, content: PacketMessage | OfferMessage | None) -> bool:
        try:
            with self._writing:
                self._connection.write(encode(0, content))
        except OSError:  # the reader notices, too, and reports it
            return False
        return True

    def _read(self) -> None:
        try:
            while True:
                self._receive(self._connection.read().decode())
                self._inbox.wake()
        except CorruptedError as error:
            self._inbox.mark_unreadable(self._process, self._here, error)
        except (EOFError, OSError):
            pass
        finally:
            self._disconnected.set()
            self._inbox.mark_disconnected(self._process)

    def _receive(self, content: PacketMessage | OfferMessage | None) -> None:
        match content:
            case PacketMessage(message, packed):
                self._inbox.add(message, _PacketArrival(self, packed))
            case OfferMessage(message, number, offered):
                try:
                    self._inbox.add(message, _TransferArrival(self, message, self._pull(number, offered)))
                except jax.errors.JaxRuntimeError as error:  # there is not enough memory
                    self.confirm()
                    reason = (
                        f"{self._inbox.name_of(message.dst)} could not receive from "
                        f"{self._inbox.name_of(message.src)}: {error}"
                    )
                    self._inbox.abort(message.step, reason)
            case None:
                self._num_confirmed += 1

    def _pull(self, number: int, offered: Sequence[OfferedArray]) -> list[jax.Array]:
        avals = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=offered_sharding(spec, self._submesh))
            for shape, dtype, spec in offered
        ]
        pulled = iter(self._server.pull(number, [a for a in avals if math.prod(a.shape)]))
        return [
            next(pulled) if math.prod(a.shape) else jax.device_put(np.zeros(a.shape, a.dtype), a.sharding)
            for a in avals
        ]

    def has_disconnected(self) -> bool:
        """Whether the connection has ended; waits until that is known."""
        return self._disconnected.wait(_DETECTION_SECONDS)

    def close(self) -> None:
        self._connection.end()
        self._confirmations.put(False)
        for thread in (self._reader, self._confirmer):
            if thread.is_alive():  # they may not have been started
                thread.join()
        self._connection.close()


class _PacketArrival(NamedTuple):
    peer: Peer
    packed: Sequence[PackedArray]

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[np.ndarray]:
        self.peer.confirm()
        return [unpack(packed) for packed in self.packed]

    def drop(self) -> None:
        self.peer.confirm()


class _TransferArrival(NamedTuple):
    """A message whose arrays are being pulled."""

    peer: Peer
    message: MessageId
    arrays: Sequence[jax.Array]

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[jax.Array]:
        try:
            jax.block_until_ready(self.arrays)
        except jax.errors.JaxRuntimeError as error:
            self.peer.confirm()
            if self.peer.has_disconnected():
                self.peer.wait_for_abort(self.message.step)
            src, tag = self.peer.name_of(self.message.src), self.message.tag
            raise RuntimeError(f"message {tag} of {src} was lost on the way: {error}") from error
        self.peer.confirm()
        return [
            array if array.sharding == sharding else jax.device_put(array, sharding)
            for array, sharding in zip(self.arrays, shardings, strict=True)
        ]

    def drop(self) -> None:
        self.peer.confirm()
