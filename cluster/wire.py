"""Host arrays as they travel between processes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Packed(NamedTuple):
    """An array as bits of a dtype that numpy itself knows, and the dtype they stand for."""

    bits: np.ndarray
    dtype: np.dtype


def pack(array: np.ndarray) -> Packed:
    """Readies an array to be pickled. Copies nothing: the bits are a view of ``array``.

    Pickle hands the buffers of numpy's own dtypes over as they are, but copies those of dtypes added to
    it, such as bfloat16, byte by byte into the message.
    """
    if array.dtype.isbuiltin == 1:
        return Packed(array, array.dtype)
    return Packed(array.view(f"u{array.dtype.itemsize}"), array.dtype)


def unpack(packed: Packed) -> np.ndarray:
    """The array again, a view of the bits: after a call of Ray's it is read-only, in memory that is Ray's."""
    return packed.bits.view(packed.dtype)
