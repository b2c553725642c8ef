"""Frames on a connection: each is a header, and the pieces that follow the header."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cluster.transports.layouts import ALIGNMENT, copy_shards
from mpmd.runtime.digests import bytes_of
from mpmd.runtime.transport import Array

Piece = bytes | memoryview

_COPIED_BYTES = 16 * 1024
"""Values up to this size are copied together; larger ones are written from where they are."""


class FrameKind(enum.IntEnum):
    MESSAGE = 0
    """A message; the types of its values follow in ``number`` bytes, and then the values."""
    OFFER = 1
    """A message that can be pulled; a pickle in ``number`` bytes follows (``Transfers``)."""
    BEGUN = 2
    """The process that sends this frame has begun ``step``."""


class Header(NamedTuple):
    kind: FrameKind
    step: int
    tag: int = 0
    number: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, packed: bytearray) -> Header:
        kind, *numbers = _HEADER.unpack(packed)
        return cls(FrameKind(kind), *numbers)


_HEADER = struct.Struct("<BqiQ")

HEADER_BYTES = _HEADER.size


def host_views(arrays: Sequence[Array]) -> list[np.ndarray]:
    """The values in host memory; views where they are there. A buffer with a view cannot be donated: what
    would be written to it goes elsewhere."""
    return [_host_view(array) for array in arrays]


def _host_view(array: Array) -> np.ndarray:
    if isinstance(array, np.ndarray) or array.is_fully_replicated:
        return np.asarray(array)
    whole = np.empty(array.shape, array.dtype)
    copy_shards(array, whole)
    return whole


def pieces_of(values: Sequence[np.ndarray]) -> list[Piece]:
    pieces: list[Piece] = []
    small = bytearray()
    for value in values:
        if value.nbytes > _COPIED_BYTES:
            if small:
                pieces.append(bytes(small))
                small = bytearray()
            pieces.append(bytes_of(value).data)
        else:
            small += value.tobytes()
        small += bytes(-value.nbytes % ALIGNMENT)
    if small:
        pieces.append(bytes(small))
    return pieces
