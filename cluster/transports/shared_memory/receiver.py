"""The receiving end of one direction between two processes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import jax
import numpy as np

from cluster.protocol.digests import CorruptedError, digest_of
from cluster.transports.inbox import ProcessInbox
from cluster.transports.layouts import decode_layout
from cluster.transports.shared_memory import announcements
from cluster.transports.shared_memory.headers import SLOT_DISCARDED, SlotHeader
from cluster.transports.shared_memory.slots import SIZE, Slot, map_slots
from mpmd.runtime.transport import MessageId


class Receiver:
    """Turns the headers of one sender into messages for the inbox.

    Args:
      connection: does not block.
      step_fd: the descriptor of the page in which the sender reads the step of this process.
    """

    def __init__(self, inbox: ProcessInbox, src: int, dst: int, connection: socket.socket, step_fd: int):
        self._inbox = inbox
        self._src = src
        self._dst = dst
        self.socket = connection
        self._slots: dict[int, Slot] = {}
        self._num_slots = 0
        announcements.send(connection, b"", inbox.write_fd, step_fd)
        inbox.add_listener(src, self._on_header)

    def _on_header(self, packed: bytes) -> None:
        try:
            header = SlotHeader.unpack(packed)
            while header.slot >= self._num_slots:
                self._read_announcement()
            if header.tag == SLOT_DISCARDED:
                del self._slots[header.slot]
                return
            message = MessageId(header.step, self._src, self._dst, header.tag)
            arrival = _SlotArrival(self, message, self._slots[header.slot], header)
            self._inbox.add(message, arrival, header.written)
        except EOFError:  # the peer is gone, which the transport notices, too
            pass
        except Exception as error:  # what it was to announce is lost, and numbers would differ from now on
            self.disconnect(error)

    def _read_announcement(self) -> None:
        """Maps the next chunk of slots, which the sender announces before a header refers to it."""
        content, (descriptor,) = announcements.receive(self.socket)
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


class _SlotArrival(NamedTuple):
    receiver: Receiver
    message: MessageId
    slot: Slot
    header: SlotHeader

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[np.ndarray]:
        try:
            nbytes = self.header.nbytes
            content = self.slot.content(nbytes + self.header.num_types)
            if digest_of(content.data) != self.header.digest:
                raise CorruptedError(f"the content of message {self.message.tag} was changed on the way")
            return self.slot.lend(content, decode_layout(content[nbytes:].tobytes()))
        except Exception as error:
            self.receiver.lose(self.message, error)

    def drop(self) -> None:
        self.slot.release()
