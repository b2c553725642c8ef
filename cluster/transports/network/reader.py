"""Reads from a connection: small frames several at a time, large values straight to where they belong."""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from cluster.tcp.connection import Connection
from cluster.transports.layouts import round_up

_READ_AHEAD_BYTES = 64 * 1024


class Reader:
    """The reading half of a connection. One thread uses it.

    Args:
      connection: stays the caller's.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._memory = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._ahead = self._memory[:0]  # what was read and not asked for yet

    def read(self, num_bytes: int) -> memoryview:
        """So many bytes; what was returned before may change. Raises as ``read_into``."""
        if num_bytes <= len(self._ahead):
            taken, self._ahead = self._ahead[:num_bytes], self._ahead[num_bytes:]
            return taken
        buffer = memoryview(bytearray(num_bytes))
        self.read_into(buffer)
        return buffer

    def read_into(self, buffer: memoryview) -> None:
        """Fills a buffer of bytes. Raises ``EOFError`` or ``OSError`` when the connection has ended."""
        while buffer:
            if not self._ahead and len(buffer) < _READ_AHEAD_BYTES:
                self._ahead = self._memory[: self._connection.read_into(self._memory)]
            if self._ahead:
                count = min(len(self._ahead), len(buffer))
                buffer[:count] = self._ahead[:count]
                self._ahead = self._ahead[count:]
            else:
                count = self._connection.read_into(buffer, whole=True)
            buffer = buffer[count:]


class BufferPool:
    """Memory for messages, used again when nothing refers to a message any more.

    New memory costs about as much time as it takes to fill it. One thread takes from the pool.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, num_bytes: int) -> np.ndarray:
        """Bytes at the beginning of a page. They are in use as long as this array or a view of it lives.

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
