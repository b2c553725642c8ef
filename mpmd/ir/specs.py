"""The meaning of a spec on a submesh: whether it fits, and into how many shards it cuts a value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from mpmd.ir.plan import Spec


def indivisible(spec: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """The dimensions that do not divide, each with the number of its shards.

    Args:
      spec: has at most as many entries as ``shape`` has dimensions.
      sizes: the sizes of a submesh's axes; an axis that is missing has one device.
    """
    for dimension, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        shards = _shards(entry, sizes)
        if size % shards:
            yield dimension, shards


def fitting(spec: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> Spec:
    """The spec if every dimension divides on a submesh; otherwise the spec of a replicated value."""
    return () if any(indivisible(spec, shape, sizes)) else spec


def axes_of(spec: Spec) -> set[str]:
    return {axis for entry in spec for axis in _axes(entry)}


def dimensions_of(spec: Spec, ndim: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes along which each dimension of a value is sharded, the major one first."""
    dimensions = tuple(map(_axes, spec))
    return dimensions + ((),) * (ndim - len(dimensions))


def num_shards(spec: Spec, sizes: Mapping[str, int]) -> int:
    return math.prod(_shards(entry, sizes) for entry in spec)


def _shards(entry: str | tuple[str, ...] | None, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in _axes(entry))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
