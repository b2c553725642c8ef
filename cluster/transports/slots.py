"""Pieces of memory that two processes share, each for one message at a time."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np

_ALIGNMENT = 64
"""Of every value: XLA reads host memory that is aligned like this where it is."""

_CHUNK_BYTES = 2**20
"""Smaller slots are made several at a time: each chunk takes a descriptor in both processes."""

_FREE, _IN_USE = 0, 1

Signature = tuple[tuple[np.dtype, tuple[int, ...]], ...]
"""The dtype and shape of each value of a message."""


class Part(NamedTuple):
    """Where a value of a message lies."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int


class Layout(NamedTuple):
    """How the values of a message lie in a slot.

    ``number`` is what the two processes call it; ``nbytes`` is what the values need; ``size`` that of a slot
    for them, whole pages that also hold the slot's own byte.
    """

    number: int
    parts: tuple[Part, ...]
    nbytes: int
    size: int


def layout_of(number: int, signature: Signature) -> Layout:
    """The values one after the other, each aligned."""
    parts, end = [], 0
    for dtype, shape in signature:
        parts.append(Part(shape, dtype, end))
        end += _up(math.prod(shape) * dtype.itemsize, _ALIGNMENT)
    return Layout(number, tuple(parts), end, _up(_ALIGNMENT + end, mmap.PAGESIZE))


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


class Slot:
    """A piece of shared memory: a byte that tells whether it is in use, and room for one message.

    The sender sets the byte, and the reader clears it when the values that it was lent are dead: no copy
    is made where the reader's executables take values in place.

    Args:
      number: what the two processes call it.
      memory: that of a chunk of slots.
      start: where in the chunk it begins.
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

    def occupy(self, layout: Layout) -> list[np.ndarray]:
        """The sender takes the slot, and gets arrays to write a message to."""
        self._memory[self._start] = _IN_USE
        if layout.number not in self._views:
            self._views[layout.number] = _views(self._memory, layout, self._start + _ALIGNMENT)
        return self._views[layout.number]

    def lend(self, layout: Layout) -> list[np.ndarray]:
        """The reader's arrays, read-only; the slot is free again when nothing refers to any of them."""
        whole = np.ndarray((layout.nbytes,), np.uint8, self._memory, self._start + _ALIGNMENT)
        whole.flags.writeable = False
        self._lent = weakref.ref(whole, self.release)
        return _views(whole, layout, 0)

    def release(self, _: object = None) -> None:
        """Gives the slot back: the reader, or the sender when nothing will be sent in it."""
        self._memory[self._start] = _FREE


class Chunk(NamedTuple):
    """Slots of one size that the processes learn of together, and that share a descriptor."""

    size: int
    num_slots: int

    @classmethod
    def of(cls, size: int) -> Chunk:
        """A chunk of slots of so many bytes; a multiple of the page size."""
        return cls(size, max(1, _CHUNK_BYTES // size))

    @property
    def nbytes(self) -> int:
        return self.size * self.num_slots

    def slots(self, descriptor: int, first: int) -> list[Slot]:
        """The slots, numbered from ``first``. The descriptor of their memory can be closed afterwards."""
        memory = mmap.mmap(descriptor, self.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return [Slot(first + i, memory, i * self.size) for i in range(self.num_slots)]


def _views(memory: mmap.mmap | np.ndarray, layout: Layout, start: int) -> list[np.ndarray]:
    return [np.ndarray(shape, dtype, memory, start + offset) for shape, dtype, offset in layout.parts]


def shared_memory(size: int) -> int:
    """A descriptor of new memory, which exists as long as a process has it open or mapped.

    Raises: ``OSError`` when there is not as much memory.
    """
    descriptor = os.memfd_create("mpmd")
    try:
        # Now, not when it is written to: then the process would be killed for it.
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
