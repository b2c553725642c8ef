"""Host arrays as they are pickled between processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class PackedArray(NamedTuple):
    """An array as bits of one of numpy's own dtypes, and the dtype that they stand for."""

    bits: np.ndarray
    dtype: np.dtype


def pack(array: np.ndarray) -> PackedArray:
    """Prepares an array for pickling. Copies nothing: the bits are a view of ``array``.

    Pickle passes the buffers of numpy's own dtypes on without a copy, but copies buffers of added dtypes,
    such as bfloat16, byte by byte into the message.
    """
    if array.dtype.isbuiltin == 1:
        return PackedArray(array, array.dtype)
    return PackedArray(array.view(f"u{array.dtype.itemsize}"), array.dtype)


def unpack(packed: PackedArray) -> np.ndarray:
    """The array, as a view of the bits. After an actor call it is read-only, in Ray's memory."""
    return packed.bits.view(packed.dtype)


class PackedValue(NamedTuple):
    """A process's share of a value: its shape, and slices by index; the index ``None`` is the whole value."""

    shape: tuple[int, ...]
    slices: tuple[tuple[tuple[slice, ...] | None, PackedArray], ...]


def join(values: Sequence[Any]) -> Any:
    """Joins the slices of all processes; if a process has the whole value, as ``unpack`` returns it.

    Args:
      values: a ``PackedValue`` of each process, or for a tuple of values a list from each process.
    """
    if isinstance(values[0], list):
        return tuple(map(join, zip(*values, strict=True)))
    slices = [piece for value in values for piece in value.slices]
    index, packed = slices[0]
    if index is None:
        return unpack(packed)
    array = np.empty(values[0].shape, packed.dtype)
    for index, packed in slices:
        array[index] = unpack(packed)
    return array
