"""What a spec means on a submesh: where it fits, and into how many parts it cuts a value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from mpmd.ir.plan import Spec


def indivisible(spec: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """The dimensions that do not divide, each with the number that it is to divide by.

    Args:
      spec: with no more entries than ``shape`` has dimensions.
      sizes: of a submesh's axes; an axis that is not there has one device.
    """
    for dimension, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        parts = _parts(entry, sizes)
        if size % parts:
            yield dimension, parts


def fitting(spec: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> Spec:
    """The spec where all of its dimensions divide on a submesh, and otherwise that of a replicated value."""
    return () if any(indivisible(spec, shape, sizes)) else spec


def axes_of(spec: Spec) -> set[str]:
    """The axes that a spec names."""
    return {axis for entry in spec for axis in _axes(entry)}


def num_parts(spec: Spec, sizes: Mapping[str, int]) -> int:
    """Into how many different parts a spec cuts a value; each device holds one of them."""
    return math.prod(_parts(entry, sizes) for entry in spec)


def _parts(entry: str | tuple[str, ...] | None, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in _axes(entry))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()
