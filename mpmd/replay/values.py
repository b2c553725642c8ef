"""Reads arrays from files, counts their NaNs and infinities, and measures how far two arrays are apart."""

from __future__ import annotations

import hashlib
import io
import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mpmd.replay.record import TASK, ValueRecord
from mpmd.util.guarded_files import naming, opened

_DAMAGES = (KeyError, ValueError, OSError, EOFError, OverflowError, RuntimeError, zipfile.BadZipFile)


def dtype_of(name: str) -> np.dtype:
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise ValueError(f"there is no dtype {name!r}") from None
    if str(dtype) != name or dtype.kind not in "biufcV" or dtype.names is not None:
        raise ValueError(f"there is no dtype {name!r} in JAX")
    return dtype


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    if min(shape, default=0) < 0:
        raise ValueError(f"no array has the shape {shape}")
    return dtype_of(dtype).itemsize * math.prod(shape)


def read_values(path: Path, values: Sequence[ValueRecord]) -> dict[str, np.ndarray | None]:
    """The arrays of an ``.npz`` file by their names; ``None`` for an array that is not stored.

    Nothing is unpickled, and no memory is taken for more bytes than the file has.

    Raises: ``ValueError`` when the file is damaged; ``OSError`` when it cannot be read.
    """
    with naming(path), opened(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        needed = sum(nbytes_of(value.dtype, value.shape) for value in values if value.is_stored)
        if needed > num_bytes:  # before any memory is taken
            raise ValueError(f"it has {num_bytes} bytes, and the values of {TASK} have {needed}")
        try:
            with zipfile.ZipFile(file) as archive:
                return {value.name: _array(archive, value) if value.is_stored else None for value in values}
        except _DAMAGES as error:
            raise ValueError(str(error)) from None


def _array(archive: zipfile.ZipFile, value: ValueRecord) -> np.ndarray:
    """Reads one array. ``numpy.load`` would take memory for whatever shape the file says."""
    dtype, num_bytes = dtype_of(value.dtype), nbytes_of(value.dtype, value.shape)
    if archive.getinfo(f"{value.name}.npy").compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{value.name} is compressed")
    with archive.open(f"{value.name}.npy") as member:
        header = _header(dtype, value.shape)
        has_header = member.read(len(header)) == header
        raw = member.read(num_bytes + 1)
    if not has_header or len(raw) != num_bytes:
        raise ValueError(f"{value.name} is no {value.dtype} of the shape {value.shape}, as {TASK} says")
    return np.frombuffer(raw, dtype).reshape(value.shape)


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Returns the bytes before an array in a file of numpy, to compare: numpy would parse them as Python."""
    file = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    fields = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue()


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def digest_of(array: np.ndarray) -> str:
    return hashlib.blake2b(as_bytes(array).data, digest_size=16).hexdigest()


def is_inexact(array: np.ndarray) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def count_nonfinite(array: np.ndarray) -> tuple[int, int]:
    if not is_inexact(array) or np.isfinite(array).all():
        return 0, 0
    return int(np.isnan(array).sum()), int(np.isinf(array).sum())


def last_digits(a: np.ndarray, b: np.ndarray) -> int:
    """The most representable numbers between two elements at one position; of other numbers, how many differ.

    Elements that are not finite in one of the arrays do not count.
    """
    if not is_inexact(a) or a.dtype.kind == "c":
        return int((a != b).sum())
    integer = np.dtype(f"i{a.itemsize}")
    least = np.int64(-(1 << (8 * a.itemsize - 1)))
    ordered = []
    for array in (a, b):
        bits = array.reshape(-1).view(integer).astype(np.int64)
        ordered.append(np.where(bits < 0, least - bits, bits))
    both = (np.isfinite(a) & np.isfinite(b)).reshape(-1)
    x, y = (values[both] for values in ordered)
    # The distance of two doubles can be larger than the largest int64.
    return int((np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)).max(initial=0))
