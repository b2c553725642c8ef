"""Delivers an argument of a call, or its layer ranges, to the groups that read it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from mpmd.arguments.leaves import host_value
from mpmd.arrays.array import MpmdArray
from mpmd.ir.placement import Placement
from mpmd.ir.stack import Stack
from mpmd.runtime.argument_cache import Delivery, PlacedPiece
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Handle


@dataclasses.dataclass(eq=False)
class DeliveredArgument:
    """An argument leaf of a call.

    Attributes:
      donated: whether the caller gives the leaf up.
      stack: its cut into the layer ranges that the step reads; ``None``: the step reads one value.
    """

    leaf: Any
    aval: jax.ShapeDtypeStruct
    donated: bool
    stack: Stack | None

    def on(self, placement: Placement, layer_range: int, runtime: Runtime, delivery: Delivery) -> Handle:
        """A handle of a layer range for groups that read it; a value that they lack joins the delivery.

        Args:
          placement: the groups that read the range, and its spec there.
          layer_range: its number; 0 of a leaf that is read as one value.
        """
        leaf = self.leaf
        if isinstance(leaf, MpmdArray) and leaf.stack == self.stack:
            held = leaf.parts[layer_range]
            if held.is_on(runtime, placement.mpmd_idxs):
                return held.handle
        # Only an array that cannot change or be deleted is the same at the next call.
        lasts = isinstance(leaf, jax.Array) and not isinstance(leaf, MpmdArray) and not self.donated
        name = self.stack.names[layer_range] if self.stack else ""
        piece = PlacedPiece(leaf, name, placement) if lasts else None
        handle = None if piece is None else delivery.find(piece)
        return delivery.send(self._values[layer_range], placement, piece) if handle is None else handle

    @functools.cached_property
    def _values(self) -> tuple[np.ndarray, ...]:
        value = host_value(self.leaf, self.aval, self.donated)
        return (value,) if self.stack is None else tuple(map(np.ascontiguousarray, self.stack.cut(value)))
