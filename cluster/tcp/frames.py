"""Messages of any objects over a connection: a number, a pickle, and the large buffers that it refers to.

The buffers are written and read without a copy. Only ends of a connection that is authenticated may use it.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cluster.tcp.connection import Connection

_LARGE_BYTES = 64 * 1024
"""Buffers above this size are not copied into the pickle."""

_HEAD = struct.Struct("<QQI")  # the number, the bytes of the pickle, the number of buffers
_SIZE = struct.Struct("<Q")

Buffer = bytes | memoryview


class Frame(NamedTuple):
    number: int
    content: Buffer
    buffers: tuple[memoryview, ...]

    def decode(self) -> Any:
        return pickle.loads(self.content, buffers=self.buffers)

    @property
    def pieces(self) -> list[memoryview]:
        head = _HEAD.pack(self.number, len(self.content), len(self.buffers))
        sizes = [_SIZE.pack(view.nbytes) for view in self.buffers]
        return [memoryview(b"".join([head, *sizes, self.content])), *self.buffers]


def encode(number: int, message: object, dumps: Callable[..., bytes] = pickle.dumps) -> Frame:
    """Makes a frame of a message; its buffers are views of the message's. Raises what pickling raises.

    Args:
      number: by which a reply finds its request.
      message: of classes that can be imported, where ``dumps`` is Python's own pickle.
      dumps: another pickle, which takes longer and takes more.
    """
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes > _LARGE_BYTES:
            large.append(view)
            return False
        return True

    content = dumps(message, protocol=5, buffer_callback=is_small)
    return Frame(number, content, tuple(large))


def read_frame(connection: Connection) -> Frame:
    """Waits for a frame, whose buffers belong to the caller.

    Raises: ``EOFError`` or ``OSError`` when the connection has ended.
    """
    number, num_bytes, num_buffers = _HEAD.unpack(_read_bytes(connection, _HEAD.size))
    sizes = [size for (size,) in _SIZE.iter_unpack(_read_bytes(connection, num_buffers * _SIZE.size))]
    content = _read_bytes(connection, num_bytes)
    return Frame(number, content, tuple([_read_bytes(connection, size) for size in sizes]))


def _read_bytes(connection: Connection, num_bytes: int) -> memoryview:
    buffer = np.empty(num_bytes, np.uint8).data
    connection.read_into(buffer)
    return buffer
