"""Memory for the messages that are received."""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from cluster.transports.layouts import round_up


class BufferPool:
    """Memory for messages, used again when nothing refers to a message any more.

    New memory costs about as much time as it takes to fill it. One thread takes from the pool.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns bytes at the beginning of a page, in use while this array or one of its views lives.

        Raises: ``OSError`` when there is not enough memory.
        """
        size = max(round_up(num_bytes, mmap.PAGESIZE), mmap.PAGESIZE)
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.ndarray((num_bytes,), np.uint8, memory)
        weakref.finalize(whole, free.append, memory).atexit = False
        return whole

    def trim(self) -> None:
        """Releases the memory that is not in use. Called from any thread."""
        self._free = {}
