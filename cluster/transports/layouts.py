"""The layout of a message's values in memory, for transports that bring them in one piece."""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from mpmd.runtime.transport import Array

ALIGNMENT = 64
"""The alignment of every value, in bytes; XLA reads host memory in place only if it is aligned like this."""

ArrayTypes = tuple[tuple[np.dtype, tuple[int, ...]], ...]

_TYPE = struct.Struct("<BB")  # the length of the dtype's name, and the number of dimensions
_SIZES = "<{}q"

_MOST_LAYOUTS = 4096
"""The most layouts that a process keeps, so that equal messages need no new one."""


class ValueLayout(NamedTuple):
    """``offset`` is in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int


class MessageLayout(NamedTuple):
    """The positions of a message's values, one after the other, each aligned.

    ``types`` are the types of the values as bytes, which travel with each message. ``nbytes`` is what the
    values need, with the padding.
    """

    types: bytes
    values: tuple[ValueLayout, ...]
    nbytes: int

    def views(self, memory: mmap.mmap | np.ndarray, start: int) -> list[np.ndarray]:
        return [np.ndarray(shape, dtype, memory, start + offset) for shape, dtype, offset in self.values]


def types_of(arrays: Sequence[Array]) -> ArrayTypes:
    return tuple([(array.dtype, array.shape) for array in arrays])


@functools.lru_cache(_MOST_LAYOUTS)
def layout_of(types: ArrayTypes) -> MessageLayout:
    """Returns the layout; its bytes have the name of each dtype, and the sizes of the dimensions.

    Raises: ``TypeError`` for a dtype that its name does not say, such as one of objects.
    """
    encoded, values, end = bytearray(), [], 0
    for dtype, shape in types:
        name = _name_of(dtype).encode()
        encoded += _TYPE.pack(len(name), len(shape)) + name
        encoded += struct.pack(_SIZES.format(len(shape)), *shape)
        values.append(ValueLayout(shape, dtype, end))
        end += round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT)
    return MessageLayout(bytes(encoded), tuple(values), end)


def _name_of(dtype: np.dtype) -> str:
    with contextlib.suppress(TypeError):  # it is the name of no dtype
        if np.dtype(dtype.name) == dtype and not dtype.hasobject:
            return dtype.name
    raise TypeError(f"values of the dtype {dtype} cannot be sent")


@functools.lru_cache(_MOST_LAYOUTS)
def decode_layout(encoded: bytes) -> MessageLayout:
    types = []
    position = 0
    while position < len(encoded):
        num_chars, ndim = _TYPE.unpack_from(encoded, position)
        position += _TYPE.size
        name = encoded[position : position + num_chars].decode()
        position += num_chars
        sizes = _SIZES.format(ndim)
        types.append((np.dtype(name), struct.unpack_from(sizes, encoded, position)))
        position += struct.calcsize(sizes)
    return layout_of(tuple(types))


def copy_shards(array: jax.Array, destination: np.ndarray) -> None:
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            destination[shard.index] = np.asarray(shard.data)


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
