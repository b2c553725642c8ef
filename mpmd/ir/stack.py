"""Arrays of stacked layers that are cut into layer ranges, as data."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

_REGION = re.compile(r"\[(?::, )*(\d+):(\d+)\]$")


@dataclasses.dataclass(frozen=True)
class Stack:
    """The cut of an array into layer ranges: consecutive slices of the axis that counts layers.

    Attributes:
      axis: the axis that counts layers.
      sizes: the number of layers in each range.
    """

    axis: int
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        ends = itertools.accumulate(self.sizes, initial=0)
        return tuple(slice(start, stop) for start, stop in itertools.pairwise(ends))

    @property
    def names(self) -> tuple[str, ...]:
        """The layer ranges as text, such as ``[0:2]`` or ``[:, 0:2]``."""
        before = ":, " * self.axis
        return tuple(f"[{before}{layers.start}:{layers.stop}]" for layers in self.slices)

    def shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple((*shape[: self.axis], size, *shape[self.axis + 1 :]) for size in self.sizes)

    def cut(self, array: Any) -> tuple[Any, ...]:
        before = (slice(None),) * self.axis
        return tuple(array[(*before, layers)] for layers in self.slices)

    def join(self, ranges: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(ranges, self.axis)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the step's arguments or result, before it is cut into layer ranges.

    Attributes:
      path: its name to users, such as ``args[0].params['w']``.
      shape: the shape of all layer ranges together.
      stack: the cut of the leaf into layer ranges; ``None``: it is one value.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    stack: Stack | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.path + name for name in self.stack.names) if self.stack else (self.path,)


def layers_of(name: str) -> range | None:
    """Parses a name that ends as in ``Stack.names``: the layers of the range; ``None`` for one value."""
    match = _REGION.search(name)
    return range(int(match[1]), int(match[2])) if match else None


def per_layer_range(leaves: Sequence[Leaf], values: Sequence[Any]) -> list[Any]:
    """The values of leaves, each repeated for every layer range of its leaf."""
    return [value for leaf, value in zip(leaves, values, strict=True) for _ in leaf.names]
