"""The connection to one other process, as this one sees it."""

from __future__ import annotations

import errno
import ssl
import threading
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import jax

from cluster.protocol.digests import CorruptedError
from cluster.tcp.connection import Connection
from cluster.tcp.sockets import UNREACHABLE_SECONDS
from cluster.tcp.writer import Writer
from cluster.transports.device.transfers import Transfers
from cluster.transports.inbox import ProcessInbox
from cluster.transports.layouts import decode_layout, layout_of, types_of
from cluster.transports.network.buffers import BufferPool
from cluster.transports.network.frames import (
    HEADER_BYTES,
    FrameKind,
    Header,
    Piece,
    host_views,
    pieces_of,
)
from cluster.transports.window import SendWindow
from mpmd.runtime.inbox import ArrayArrival, Arrival
from mpmd.runtime.transport import Array, MessageId

_DETECTION_SECONDS = 1.0
"""Within this time of a failed pull it is known whether the peer's connection has ended."""

_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Peer:
    """The connection, in both directions, with a thread that reads and one that writes.

    Devices exchange the larger arrays by ``transfers``; with ``None``, all arrays go by ``connection``, which
    ``close`` closes.
    """

    def __init__(
        self,
        inbox: ProcessInbox,
        here: int,
        process: int,
        connection: Connection,
        transfers: Transfers | None = None,
    ):
        self._inbox = inbox
        self._here = here
        self._process = process
        self._connection = connection
        self._transfers = transfers
        self._buffers = BufferPool()
        self._writer = Writer(connection, f"to {process}")
        self._window = SendWindow()
        self._begun = 0  # the last step that the peer has said to have begun
        self._is_waiting = False
        self._arrived = 0  # the step of the last message
        self._confirmed = 0  # the last step that the peer was told of
        self._disconnected = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"from {process}", daemon=True)

    def start(self) -> None:
        self._writer.start()
        self._thread.start()

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        """As in ``Transport``. Raises ``StepAborted`` when the peer is gone."""
        self._wait_until_ready(message.step)
        offer = None if self._transfers is None else self._transfers.offer(arrays)
        if offer is None:
            pieces = self._pieces(message, arrays)
        else:
            pieces = [Header(FrameKind.OFFER, message.step, message.tag, len(offer)).pack(), offer]
        self._writer.put(pieces)
        self._window.mark_sent(message.step)

    def _pieces(self, message: MessageId, arrays: Sequence[Array]) -> list[Piece]:
        values = host_views(arrays)
        types = layout_of(types_of(values)).types
        header = Header(FrameKind.MESSAGE, message.step, message.tag, len(types))
        return [header.pack(), types, *pieces_of(values)]

    def _wait_until_ready(self, step: int) -> None:
        required = self._window.required(step)
        self._is_waiting = True  # from now on, the reader wakes this thread
        self._inbox.wait(step, lambda: self._begun >= required)
        self._is_waiting = False
        if self._disconnected.is_set():
            self._inbox.wait(step, lambda: False)

    def _read(self) -> None:
        error: Exception | None = None
        try:
            while True:
                self._receive(Header.unpack(self._read_bytes(HEADER_BYTES)))
        except (EOFError, OSError, MemoryError) as caught:
            error = caught
        finally:
            self._connection.end()
            self._writer.close()
            self._disconnected.set()
            if isinstance(error, CorruptedError | MemoryError) or (
                isinstance(error, OSError) and error.errno == errno.ENOMEM
            ):
                self._inbox.mark_unreadable(self._process, self._here, error)
            else:
                self._inbox.mark_disconnected(self._process, _reason(error, self._writer.error))
            error = None  # its traceback has this frame, and so the buffers

    def _receive(self, header: Header) -> None:
        message = MessageId(header.step, self._process, self._here, header.tag)
        match header.kind:
            case FrameKind.MESSAGE:
                layout = decode_layout(bytes(self._read_bytes(header.number)))
                buffer = self._buffers.take(layout.nbytes)
                self._connection.read_into(buffer.data)
                buffer.flags.writeable = False  # executables read it in place
                self._add(message, ArrayArrival(layout.views(buffer, 0)))
            case FrameKind.OFFER:
                self._pull(message, self._read_bytes(header.number))
            case FrameKind.BEGUN:
                self._begun = max(self._begun, header.step)
                if self._is_waiting:
                    self._inbox.wake()
                return
        self._arrived = header.step
        self.confirm()

    def _add(self, message: MessageId, arrival: Arrival) -> None:
        self._inbox.add(message, arrival)
        self._inbox.wake()

    def _pull(self, message: MessageId, content: bytearray) -> None:
        assert self._transfers is not None, "only peers with transfers make offers"
        try:
            self._add(message, _TransferArrival(self, message, self._transfers.pull(content)))
        except jax.errors.JaxRuntimeError as error:  # there is not enough memory
            receiver, sender = self._inbox.name_of(self._here), self._inbox.name_of(self._process)
            self._inbox.abort(message.step, f"{receiver} could not receive from {sender}: {error}")

    def lose(self, message: MessageId, error: Exception) -> NoReturn:
        """Raises the error of a message that could not be pulled; ``StepAborted`` when the peer is gone."""
        if self._disconnected.wait(_DETECTION_SECONDS):
            self._inbox.wait(message.step, lambda: False)
        sender = self._inbox.name_of(self._process)
        raise RuntimeError(f"message {message.tag} of {sender} was lost on the way: {error}") from error

    def _read_bytes(self, num_bytes: int) -> bytearray:
        content = bytearray(num_bytes)
        self._connection.read_into(memoryview(content))
        return content

    def confirm(self) -> None:
        """Tells the peer, once, that this process has begun the step of the last message. For any thread."""
        step = self._arrived
        if self._confirmed < step <= self._inbox.step:
            self._confirmed = step
            self._writer.put([Header(FrameKind.BEGUN, step).pack()])

    def trim(self) -> None:
        self._buffers.trim()

    def close(self) -> None:
        """Ends the connection, so that the peer takes this process for dead."""
        self._connection.end()
        self._thread.join()
        self._connection.close()


def _reason(*errors: Exception | None) -> str:
    for error in errors:
        if isinstance(error, OSError) and error.errno in _UNREACHABLE:
            return f"the network has not reached it for {UNREACHABLE_SECONDS} s ({error})"
        if isinstance(error, ssl.SSLError):
            return f"what arrives from it cannot be decrypted ({error})"
    return "its process has closed its connections"


class _TransferArrival(NamedTuple):
    peer: Peer
    message: MessageId
    arrays: Sequence[jax.Array]

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[jax.Array]:
        try:
            jax.block_until_ready(self.arrays)
        except jax.errors.JaxRuntimeError as error:
            self.peer.lose(self.message, error)
        return [
            array if array.sharding == sharding else jax.device_put(array, sharding)
            for array, sharding in zip(self.arrays, shardings, strict=True)
        ]

    def drop(self) -> None:
        pass
