"""The receiving end of one direction between two processes."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import jax
import numpy as np

from cluster.protocol.digests import CorruptedError, digest_of
from cluster.transports.inbox import ProcessInbox
from cluster.transports.layouts import MessageLayout, decode_types
from cluster.transports.shared_memory.announcements import announcement, receive
from cluster.transports.shared_memory.headers import SLOT_DISCARDED, SlotHeader
from cluster.transports.shared_memory.slots import SIZE, Slot, allocate, map_counter, map_slots
from mpmd.runtime.transport import MessageId


class Receiver:
    """Turns the headers of one sender into messages for the inbox. ``connection`` does not block."""

    def __init__(self, inbox: ProcessInbox, src: int, dst: int, connection: socket.socket):
        self._inbox = inbox
        self._src = src
        self._dst = dst
        self.socket = connection
        self._layouts: list[MessageLayout] = []
        self._slots: dict[int, Slot] = {}
        self._num_slots = 0
        self._counting = threading.Lock()
        counter = allocate(mmap.PAGESIZE)
        try:
            self._num_received = map_counter(counter)
            with announcement(b"", inbox.write_fd, counter) as announced:
                announced.send(connection)
        finally:
            os.close(counter)
        inbox.add_listener(src, self._on_header)

    def _on_header(self, packed: bytes) -> None:
        try:
            header = SlotHeader.unpack(packed)
            while header.slot >= self._num_slots or header.layout >= len(self._layouts):
                self._read_announcement()
            if header.tag == SLOT_DISCARDED:
                del self._slots[header.slot]
                return
            message = MessageId(header.step, self._src, self._dst, header.tag)
            slot, layout = self._slots[header.slot], self._layouts[header.layout]
            self._inbox.add(message, _SlotArrival(self, message, slot, layout, header.digest), header.written)
        except EOFError:  # the peer is gone, which the transport notices, too
            pass
        except Exception as error:  # what it was to announce is lost, and numbers would differ from now on
            self.disconnect(error)

    def _read_announcement(self) -> None:
        """Reads what a header refers to, which was sent before it: a layout, or a chunk of slots."""
        content, descriptors = receive(self.socket)
        if not descriptors:
            self._layouts.append(MessageLayout.of(len(self._layouts), decode_types(content)))
        for descriptor in descriptors:
            try:
                (size,) = SIZE.unpack(content)
                added = map_slots(descriptor, size, self._num_slots)
            finally:
                os.close(descriptor)
            self._slots |= {slot.number: slot for slot in added}
            self._num_slots += len(added)

    def disconnect(self, error: Exception) -> None:
        self._inbox.mark_unreadable(self._src, self._dst, error)
        with contextlib.suppress(OSError):  # the other end has closed it
            self.socket.shutdown(socket.SHUT_RDWR)

    def lose(self, message: MessageId, error: Exception) -> NoReturn:
        """Ends the connection because of a message. Raises ``StepAborted``."""
        self.disconnect(error)
        self._inbox.wait(message.step, lambda: False)
        raise AssertionError("waiting for nothing ends with the step")

    def count_received(self) -> None:
        """Counts a message, for the sender's window. Called from any thread."""
        with self._counting:
            self._num_received[0] += 1


class _SlotArrival(NamedTuple):
    receiver: Receiver
    message: MessageId
    slot: Slot
    layout: MessageLayout
    digest: int

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[np.ndarray]:
        try:
            content = self.slot.content(self.layout)
            if digest_of(content.data) != self.digest:
                raise CorruptedError(f"the content of message {self.message.tag} was changed on the way")
            values = self.slot.lend(content, self.layout)
        except Exception as error:
            self.receiver.lose(self.message, error)
        self.receiver.count_received()
        return values

    def drop(self) -> None:
        self.slot.release()
        self.receiver.count_received()
