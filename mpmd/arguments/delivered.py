"""Delivers an argument of a call, or its layer ranges, to the groups that read it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from mpmd.arguments.leaves import host_value
from mpmd.arrays.array import MpmdArray
from mpmd.ir.placement import Placement
from mpmd.ir.stack import Stack
from mpmd.runtime.argument_cache import Delivery, Piece
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Handle


def held_range(leaf: Any, stack: Stack | None, layer_range: int) -> MpmdArray | None:
    """The array of a layer range, if groups hold the leaf cut as this stack is."""
    is_held = isinstance(leaf, MpmdArray) and leaf.stack == stack
    return leaf.parts[layer_range] if is_held else None


class Argument:
    """An argument leaf of a call.

    Attributes:
      leaf, aval, donated: itself, its shape and dtype, and whether the caller gives it up.
      stack: its cut into the layer ranges that the step reads; ``None``: the step reads one value.
    """

    def __init__(self, leaf: Any, aval: jax.ShapeDtypeStruct, donated: bool, stack: Stack | None):
        self._leaf = leaf
        self._aval = aval
        self._donated = donated
        self._stack = stack

    def on(self, placement: Placement, layer_range: int, runtime: Runtime, delivery: Delivery) -> Handle:
        """A handle of a layer range for groups that read it; a value that they lack joins the delivery.

        Args:
          placement: the groups that read the range, and its spec there.
          layer_range: its number; 0 of a leaf that is read as one value.
        """
        leaf = self._leaf
        held = held_range(leaf, self._stack, layer_range)
        if held is not None and held.is_on(runtime, placement.mpmd_idxs):
            return held.handle
        # Only an array that cannot change or be deleted is the same at the next call.
        lasts = isinstance(leaf, jax.Array) and not isinstance(leaf, MpmdArray) and not self._donated
        name = self._stack.names[layer_range] if self._stack else ""
        piece = Piece(leaf, name, placement) if lasts else None
        handle = None if piece is None else delivery.find(piece)
        return delivery.send(self._values[layer_range], placement, piece) if handle is None else handle

    @functools.cached_property
    def _values(self) -> tuple[np.ndarray, ...]:
        """The layer ranges on the host."""
        value = host_value(self._leaf, self._aval, self._donated)
        return (value,) if self._stack is None else tuple(map(np.ascontiguousarray, self._stack.cut(value)))
