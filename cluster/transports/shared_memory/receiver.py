"""The receiving end of one direction between two processes."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from cluster.transports.inbox import Inbox
from cluster.transports.layouts import MessageLayout
from cluster.transports.shared_memory.announcements import announcement, receive
from cluster.transports.shared_memory.slots import Slot, allocate, map_counter
from mpmd.runtime.transport import MessageId

SLOT_DISCARDED = -1
"""In a header in place of a tag: the sender does not use the slot any more."""


class Receiver:
    """Turns the headers of one sender into messages for the inbox.

    Args:
      inbox: where the messages go.
      src: the process that sends.
      dst: the process that receives.
      connection: the socket to its ``Sender``.
    """

    def __init__(self, inbox: Inbox, src: int, dst: int, connection: socket.socket):
        self._inbox = inbox
        self._src = src
        self._dst = dst
        self.socket = connection
        self._layouts: list[MessageLayout] = []
        self._slots: dict[int, Slot] = {}
        self._num_slots = 0
        self._counting = threading.Lock()
        counter = allocate(mmap.PAGESIZE)
        self._num_received = map_counter(counter)
        with announcement(None, inbox.write_fd, counter) as announced:
            announced.send(connection)
        os.close(counter)
        inbox.add_listener(src, self._on_header)

    def _on_header(self, tag: int, step: int, slot: int, layout: int) -> None:
        while slot >= self._num_slots or layout >= len(self._layouts):
            self._read_announcement()
        if tag == SLOT_DISCARDED:
            del self._slots[slot]
        else:
            arrival = _SlotArrival(self, self._slots[slot], self._layouts[layout])
            self._inbox.add(MessageId(step, self._src, self._dst, tag), arrival)

    def _read_announcement(self) -> None:
        """Reads what a header refers to, which was sent before it: a layout, or a chunk of slots."""
        content, descriptors = receive(self.socket)
        if not descriptors:
            self._layouts.append(MessageLayout.of(len(self._layouts), content))
        for descriptor in descriptors:
            added = content.slots(descriptor, self._num_slots)
            os.close(descriptor)
            self._slots |= {slot.number: slot for slot in added}
            self._num_slots += len(added)

    def count_received(self) -> None:
        """Counts a message, for the sender's window. Called from any thread."""
        with self._counting:
            self._num_received[0] += 1


class _SlotArrival(NamedTuple):
    """A message in its slot."""

    receiver: Receiver
    slot: Slot
    layout: MessageLayout

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[np.ndarray]:
        values = self.slot.lend(self.layout)
        self.receiver.count_received()
        return values

    def drop(self) -> None:
        self.slot.release()
        self.receiver.count_received()
