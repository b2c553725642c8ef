"""Pieces of memory that two processes share, each for one message at a time."""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from typing import NamedTuple

import numpy as np

from cluster.transports.layouts import ALIGNMENT, MessageLayout, round_up

_CHUNK_BYTES = 2**20
"""Smaller slots are allocated several at a time: each chunk takes a descriptor in both processes."""

_FREE, _IN_USE = 0, 255


def slot_size(nbytes: int) -> int:
    """The bytes of a slot for ``nbytes`` of values: whole pages, which also hold the slot's own byte."""
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
        self._views: dict[int, list[np.ndarray]] = {}
        self._lent: weakref.ref | None = None

    @property
    def free(self) -> bool:
        return self._memory[self._start] == _FREE

    def occupy(self, layout: MessageLayout) -> list[np.ndarray]:
        """The sender marks the slot as in use, and gets arrays to write a message to."""
        self._memory[self._start] = _IN_USE
        if layout.number not in self._views:
            self._views[layout.number] = layout.views(self._memory, self._start + ALIGNMENT)
        return self._views[layout.number]

    def content(self, layout: MessageLayout) -> np.ndarray:
        return np.ndarray((layout.nbytes,), np.uint8, self._memory, self._start + ALIGNMENT)

    def lend(self, layout: MessageLayout) -> list[np.ndarray]:
        """The receiver's arrays, read-only. The slot is free again when nothing refers to these arrays."""
        whole = self.content(layout)
        whole.flags.writeable = False
        self._lent = weakref.ref(whole, self.release)
        return layout.views(whole, 0)

    def release(self, _: object = None) -> None:
        """Marks the slot as free: called by the receiver, or by a sender that sends nothing in it."""
        self._memory[self._start] = _FREE


_CHUNK = struct.Struct("<QQ")


class Chunk(NamedTuple):
    """Slots of one size that are announced together, and share one descriptor."""

    size: int
    num_slots: int

    @classmethod
    def of(cls, size: int) -> Chunk:
        return cls(size, max(1, _CHUNK_BYTES // size))

    @classmethod
    def decode(cls, encoded: bytes) -> Chunk:
        return cls(*_CHUNK.unpack(encoded))

    def encode(self) -> bytes:
        return _CHUNK.pack(*self)

    @property
    def nbytes(self) -> int:
        return self.size * self.num_slots

    def slots(self, descriptor: int, first: int) -> list[Slot]:
        """The slots, numbered from ``first``. The descriptor of their memory can be closed afterwards."""
        memory = mmap.mmap(descriptor, self.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return [Slot(first + i, memory, i * self.size) for i in range(self.num_slots)]


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


def map_counter(descriptor: int) -> memoryview:
    """A page of shared memory as 64-bit integers. The descriptor can be closed afterwards."""
    return memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")
