"""Pieces of memory that two processes share, each for one message at a time."""

from __future__ import annotations

import mmap
import os
import struct
import weakref

import numpy as np

from cluster.transports.layouts import ALIGNMENT, MessageLayout, round_up

_CHUNK_BYTES = 2**20
"""Smaller slots share a chunk of memory: each chunk takes a descriptor in both processes."""

_FREE, _IN_USE = 0, 255

SIZE = struct.Struct("<Q")
"""The announcement of a chunk: the bytes of each of its slots."""


def slot_size(nbytes: int) -> int:
    """The bytes of a slot for ``nbytes`` of content: whole pages, which also hold the slot's own byte."""
    return round_up(ALIGNMENT + nbytes, mmap.PAGESIZE)


class Slot:
    """A piece of shared memory: a byte that says whether it is in use, and room for one message.

    The sender sets the byte. The receiver clears it when the arrays that it was lent are dead; its
    executables read them in place, without a copy.

    Args:
      number: identifies the slot in both processes.
      memory: the memory of its chunk.
      start: its first byte in the chunk.
    """

    def __init__(self, number: int, memory: mmap.mmap, start: int):
        self.number = number
        self._memory = memory
        self._start = start
        self._views: dict[bytes, tuple[list[np.ndarray], np.ndarray]] = {}  # by ``MessageLayout.types``
        self._lent: weakref.ref | None = None

    @property
    def free(self) -> bool:
        return self._memory[self._start] == _FREE

    def occupy(self, layout: MessageLayout) -> tuple[list[np.ndarray], np.ndarray]:
        """Marks the slot as in use. Returns the arrays to write the values to, and the whole content."""
        self._memory[self._start] = _IN_USE
        if layout.types not in self._views:
            views = layout.views(self._memory, self._start + ALIGNMENT)
            self._views[layout.types] = views, self.content(layout.nbytes + len(layout.types))
        return self._views[layout.types]

    def content(self, nbytes: int) -> np.ndarray:
        """The bytes of a message in the slot: the values with the padding, and their types."""
        return np.ndarray((nbytes,), np.uint8, self._memory, self._start + ALIGNMENT)

    def lend(self, content: np.ndarray, layout: MessageLayout) -> list[np.ndarray]:
        """The receiver's arrays, read-only. The slot is free again when nothing refers to these arrays."""
        content.flags.writeable = False
        self._lent = weakref.ref(content, self.release)
        return layout.views(content, 0)

    def release(self, _: object = None) -> None:
        """Marks the slot as free: called by the receiver, or by a sender that sends nothing in it."""
        self._memory[self._start] = _FREE


def chunk_size(size: int) -> int:
    """The bytes to allocate for slots of ``size`` bytes: for several at a time if they are small."""
    return size * max(1, _CHUNK_BYTES // size)


def map_slots(descriptor: int, size: int, first: int) -> list[Slot]:
    """The slots of ``size`` bytes in the memory of a descriptor, which can be closed afterwards.

    Args:
      first: the number of the first slot.
    """
    memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return [Slot(first + i, memory, start) for i, start in enumerate(range(0, len(memory), size))]


def allocate(size: int) -> int:
    """A descriptor of new memory of ``size`` bytes, which exists while a process has it open or mapped.

    Raises: ``OSError`` when there is not enough memory.
    """
    descriptor = os.memfd_create("mpmd")
    try:
        # Reserved now: if memory were missing at the first write, the process would be killed.
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_step(descriptor: int) -> memoryview:
    """A page of shared memory, whose first number is a step. The descriptor can be closed afterwards."""
    return memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")
