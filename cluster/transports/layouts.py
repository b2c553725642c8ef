"""The layout of a message's values in memory, for transports that bring them in one piece."""

from __future__ import annotations

import contextlib
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


class ValueLayout(NamedTuple):
    """``offset`` is in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int


class MessageLayout(NamedTuple):
    """The positions of a message's values, one after the other, each aligned.

    ``number`` identifies the layout in both processes. ``nbytes`` is what the values need, with the padding.
    """

    number: int
    values: tuple[ValueLayout, ...]
    nbytes: int

    @classmethod
    def of(cls, number: int, types: ArrayTypes) -> MessageLayout:
        values, end = [], 0
        for dtype, shape in types:
            values.append(ValueLayout(shape, dtype, end))
            end += round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT)
        return cls(number, tuple(values), end)

    def views(self, memory: mmap.mmap | np.ndarray, start: int) -> list[np.ndarray]:
        return [np.ndarray(shape, dtype, memory, start + offset) for shape, dtype, offset in self.values]


def types_of(arrays: Sequence[Array]) -> ArrayTypes:
    return tuple([(array.dtype, array.shape) for array in arrays])


def encode_types(types: ArrayTypes) -> bytes:
    """The types as plain bytes: of each, the name of the dtype and the sizes of the dimensions.

    Raises: ``TypeError`` for a dtype that its name does not say, such as one of objects.
    """
    encoded = bytearray()
    for dtype, shape in types:
        name = _name_of(dtype).encode()
        encoded += _TYPE.pack(len(name), len(shape)) + name
        encoded += struct.pack(_SIZES.format(len(shape)), *shape)
    return bytes(encoded)


def _name_of(dtype: np.dtype) -> str:
    with contextlib.suppress(TypeError):  # it is the name of no dtype
        if np.dtype(dtype.name) == dtype and not dtype.hasobject:
            return dtype.name
    raise TypeError(f"values of the dtype {dtype} cannot be sent")


def decode_types(encoded: bytes | bytearray) -> ArrayTypes:
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
    return tuple(types)


def copy_shards(array: jax.Array, destination: np.ndarray) -> None:
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            destination[shard.index] = np.asarray(shard.data)


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
