"""Arrays as bytes: their digests, their ranges, and how far two of them are apart."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np


def dtype_of(name: str) -> np.dtype:
    """The dtype of a name of numpy or ``ml_dtypes``. Raises ``ValueError`` for any other."""
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise ValueError(f"there is no dtype {name!r}") from None
    if str(dtype) != name or dtype.kind not in "biufcV" or dtype.names is not None:
        raise ValueError(f"there is no dtype {name!r} in JAX")
    return dtype


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, one after the other."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """The bytes of an array of a type. Raises ``ValueError`` when there is no such array."""
    if min(shape, default=0) < 0:
        raise ValueError(f"no array has the shape {shape}")
    return dtype_of(dtype).itemsize * math.prod(shape)


def from_bytes(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of ``as_bytes``. Raises ``ValueError`` when the bytes are not of this shape."""
    if raw.size != nbytes_of(dtype, shape):
        raise ValueError(f"{raw.size} bytes are no {dtype} of the shape {shape}")
    return raw.view(dtype_of(dtype)).reshape(shape)


def constant_of(data: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array of bytes in hexadecimal. Raises ``ValueError`` when they are not of this type."""
    return from_bytes(np.frombuffer(bytes.fromhex(data), np.uint8), dtype, shape)


def digest_of(array: np.ndarray) -> str:
    """A digest of the bytes of an array."""
    return hashlib.blake2b(as_bytes(array).data, digest_size=16).hexdigest()


def is_inexact(array: np.ndarray) -> bool:
    """Whether an array is of floating-point or complex numbers."""
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def is_finite(array: np.ndarray) -> np.ndarray:
    """The positions of the elements of an array that are finite."""
    return np.isfinite(array) if is_inexact(array) else np.ones(array.shape, bool)


def count_nonfinite(array: np.ndarray) -> tuple[int, int]:
    """The number of NaNs and of infinities in an array."""
    if not is_inexact(array) or np.isfinite(array).all():
        return 0, 0
    return int(np.isnan(array).sum()), int(np.isinf(array).sum())


@dataclasses.dataclass(frozen=True)
class Range:
    """The values of an array in short.

    Attributes:
      low, high: the least and the greatest finite element, of complex numbers by absolute value; ``None``
        where there is none.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    num_nans: int
    num_infs: int

    @staticmethod
    def of(array: np.ndarray) -> Range:
        """The range of an array."""
        wide = np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)
        wide = wide[np.isfinite(wide)]
        low, high = (float(wide.min()), float(wide.max())) if wide.size else (None, None)
        return Range(str(array.dtype), array.shape, low, high, *count_nonfinite(array))

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.low is None:
            text += ", nothing finite"
        elif self.low == self.high:
            text += f", {self.low:g}"
        else:
            text += f", {self.low:g} to {self.high:g}"
        counts = ((self.num_nans, "NaN"), (self.num_infs, "infinite"))
        return text + "".join(f", {count} {name}" for count, name in counts if count)


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
    x, y = (values[both].astype(np.float64) for values in ordered)
    return int(np.abs(x - y).max()) if both.any() else 0
