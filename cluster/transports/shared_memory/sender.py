"""The sending end of one direction between two processes."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence

import numpy as np

from cluster.protocol.digests import Digest
from cluster.transports.inbox import ProcessInbox
from cluster.transports.layouts import MessageLayout, copy_shards, layout_of, types_of
from cluster.transports.shared_memory import announcements
from cluster.transports.shared_memory.headers import SLOT_DISCARDED, SlotHeader
from cluster.transports.shared_memory.slots import (
    SIZE,
    Slot,
    allocate,
    chunk_size,
    map_slots,
    map_step,
    slot_size,
)
from cluster.transports.window import SendWindow
from mpmd.runtime.transport import Array, MessageId

_POLL_SECONDS = 2e-4
"""The seconds until a sender that waits for its receiver checks again; later it checks less often."""

_CHUNK_BYTES = 128 * 1024
"""The bytes that are copied at a time, and added to the digest while they are in a processor's cache."""


class Sender:
    """``connection`` does not block; the receiver has said over it where its inbox is."""

    def __init__(self, inbox: ProcessInbox, src: int, dst: int, connection: socket.socket):
        self._inbox = inbox
        self._src = src
        self._dst = dst
        self._window = SendWindow()
        self._slots: dict[int, list[Slot]] = {}  # by size
        self._num_slots = 0
        self.socket = connection
        _, (self._write_fd, step) = announcements.receive(connection)
        try:
            self._begun = map_step(step)
        finally:
            os.close(step)

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        step = message.step
        required = self._window.required(step)
        if self._begun[0] < required:
            self._wait(step, lambda: self._begun[0] >= required)
        layout = layout_of(types_of(arrays))
        slot = self._free_slot(step, slot_size(layout.nbytes + len(layout.types)))
        try:
            digest = _fill(slot, layout, arrays)
            written = time.perf_counter_ns()
            header = SlotHeader(
                self._src,
                message.tag,
                step,
                slot.number,
                len(layout.types),
                layout.nbytes,
                digest,
                written,
            ).pack()
            if not self._try_write(header):
                self._wait(step, lambda: self._try_write(header))
        except BaseException:
            slot.release()
            raise
        self._window.mark_sent(step)

    def _wait(self, step: int, ready: Callable[[], bool]) -> None:
        self._inbox.wait(step, ready, _POLL_SECONDS)

    def _free_slot(self, step: int, size: int) -> Slot:
        slots = self._slots.setdefault(size, [])
        for slot in slots:  # from the front, so that the same few are used, and stay in the caches
            if slot.free:
                return slot
        nbytes = chunk_size(size)
        try:
            descriptor = allocate(nbytes)
            try:
                added = map_slots(descriptor, size, self._num_slots)
                self._wait(step, lambda: self._try_announce(size, descriptor))
            finally:
                os.close(descriptor)
        except OSError as error:
            shared = f"{nbytes} bytes of memory to share with {self._inbox.name_of(self._dst)}"
            raise RuntimeError(f"{self._inbox.name_of(self._src)} has no {shared}: {error}") from error
        self._num_slots += len(added)
        slots.extend(added)
        return added[0]

    def _try_announce(self, size: int, descriptor: int) -> bool:
        """Announces slots. Returns ``False`` if the socket is full, or the receiver is gone."""
        try:
            announcements.send(self.socket, SIZE.pack(size), descriptor)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS, errno.EPIPE, errno.ECONNRESET):
                raise
            return False
        return True

    def _try_write(self, header: bytes) -> bool:
        """Writes a header. Returns ``False`` if the receiver's inbox is full, or the receiver is gone."""
        try:
            os.write(self._write_fd, header)
        except (BlockingIOError, BrokenPipeError):
            return False
        return True

    def trim(self) -> None:
        for size, slots in self._slots.items():
            self._slots[size] = [slot for slot in slots if not self._discard(slot)]

    def _discard(self, slot: Slot) -> bool:
        discarded = SlotHeader(self._src, SLOT_DISCARDED, 0, slot.number)
        return slot.free and self._try_write(discarded.pack())

    def close(self) -> None:
        os.close(self._write_fd)


def _fill(slot: Slot, layout: MessageLayout, arrays: Sequence[Array]) -> int:
    """Copies a message to its slot. Returns the digest of the slot's content."""
    (views, content), digest = slot.occupy(layout), Digest()
    content[layout.nbytes :] = np.frombuffer(layout.types, np.uint8)
    num_digested = 0
    for value, destination, array in zip(layout.values, views, arrays, strict=True):
        if not isinstance(array, np.ndarray) and not array.is_fully_replicated:
            copy_shards(array, destination)
            continue
        whole = np.asarray(array)
        if whole.nbytes <= _CHUNK_BYTES or not whole.flags.c_contiguous:
            destination[...] = whole
            continue
        source = whole.reshape(-1).view(np.uint8)
        for start in range(0, source.nbytes, _CHUNK_BYTES):
            chunk = source[start : start + _CHUNK_BYTES]
            stop = value.offset + start + chunk.nbytes
            content[value.offset + start : stop] = chunk
            digest.update(content[num_digested:stop].data)
            num_digested = stop
    digest.update(content[num_digested:].data)
    return digest.intdigest()
