"""Arrays of stacked layers that are in parts, as data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

Region = tuple[slice, ...]
"""A slice for each dimension."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """How an array is in parts: slices of one of its axes, the layers, one behind the other.

    Attributes:
      axis: the axis that counts layers.
      sizes: of the parts along this axis.
    """

    axis: int
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part of the axis that each part has."""
        ends = itertools.accumulate(self.sizes, initial=0)
        return tuple(slice(start, stop) for start, stop in itertools.pairwise(ends))

    @property
    def regions(self) -> tuple[Region, ...]:
        """What to index the whole array by to have each part."""
        return tuple((*[slice(None)] * self.axis, part) for part in self.slices)

    @property
    def names(self) -> tuple[str, ...]:
        """The regions as text, such as ``[0:2]`` or ``[:, 0:2]``."""
        before = ":, " * self.axis
        return tuple(f"[{before}{part.start}:{part.stop}]" for part in self.slices)

    def shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parts of an array of a shape."""
        return tuple((*shape[: self.axis], size, *shape[self.axis + 1 :]) for size in self.sizes)

    def cut(self, array: Any) -> tuple[Any, ...]:
        """The parts of an array."""
        return tuple(array[region] for region in self.regions)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The array that has these parts."""
        return np.concatenate(parts, self.axis)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the step's arguments or result, as its user has it.

    Attributes:
      path: what users call it, such as ``args[0].params['w']``.
      shape: of the whole; ``dtype`` and ``weak_type`` are those of each part.
      stack: how it is in parts; ``None``: it is one value.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    stack: Stack | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What its parts are called; its own name if it is one value."""
        return tuple(self.path + name for name in self.stack.names) if self.stack else (self.path,)


def per_part(leaves: Sequence[Leaf], values: Sequence[Any]) -> list[Any]:
    """Values of leaves, once for each part of the leaf."""
    return [value for leaf, value in zip(leaves, values, strict=True) for _ in leaf.names]
