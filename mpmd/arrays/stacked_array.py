"""Arrays of stacked layers on groups: each group holds a range of the layers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from mpmd.arrays.array import Copy, MpmdArray, values_of
from mpmd.compat import register_array_type
from mpmd.ir.placement import Placement
from mpmd.ir.stack import Stack
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Handle
from mpmd.runtime.step_future import StepFuture


class StackedMpmdArray(MpmdArray):
    """An ``MpmdArray`` in layer ranges, each on groups of its own; users handle it as one array.

    It is read, passed, donated and saved as a whole.

    Attributes:
      mpmd_idxs: the groups that hold one of its layer ranges.
      spec, submeshes, submesh: as of its first layer range.
      stack: the axis that counts layers, and the number of layers of each range.
      parts: an ``MpmdArray`` for each layer range.
    """

    stack: Stack

    def __init__(self, aval: jax.ShapeDtypeStruct, stack: Stack, parts: tuple[MpmdArray, ...]):
        self._aval = aval
        self.stack = stack
        self._parts = parts
        self.runtime = parts[0].runtime

    @property
    def parts(self) -> tuple[MpmdArray, ...]:
        return self._parts

    # Each layer range says where it is, and may come to stand for another value.

    @property
    def submeshes(self) -> tuple[AbstractMesh, ...]:
        return self.parts[0].submeshes

    @property
    def placement(self) -> Placement:
        spec = self.parts[0].placement.spec
        return Placement.of_ranges(self.stack, tuple(part.mpmd_idxs for part in self.parts), spec)

    @property
    def handle(self) -> Handle:
        raise TypeError(f"{self!r} has no handle of its own, but its parts have")

    def is_on(self, runtime: Runtime, mpmd_idxs: tuple[int, ...]) -> bool:
        return all(part.is_on(runtime, mpmd_idxs) for part in self.parts)

    def is_deleted(self) -> bool:
        return any(part.is_deleted() for part in self.parts)

    def delete(self) -> None:
        for part in self.parts:
            part.delete()

    def donate_to(self, future: StepFuture) -> None:
        for part in self.parts:
            part.donate_to(future)

    def __del__(self) -> None:
        """Each layer range drops its value when nothing refers to it."""

    def block_until_ready(self) -> StackedMpmdArray:
        for part in self.parts:
            part.block_until_ready()
        return self

    @property
    def copies(self) -> dict[int, Copy]:
        raise TypeError(f"{self!r} is in parts: read the copies of each of its parts")

    @property
    def to_mpmd_local_array(self) -> list[Any]:
        """For each layer range the value of its only copy, or the list of the values of its copies."""
        return [part.to_mpmd_local_array for part in self.parts]

    def copy_to_host_async(self) -> None:
        for part in self.parts:
            part.copy_to_host_async()

    def raw_value(self) -> np.ndarray:
        if self.is_deleted():
            raise RuntimeError(f"{self!r} was donated to a step or deleted")
        self.copy_to_host_async()
        return self.stack.join([part.raw_value() for part in self.parts])

    def __repr__(self) -> str:
        state = ", deleted" if self.is_deleted() else ""
        named = zip(self.stack.names, self.parts, strict=True)
        ranges = ", ".join(f"{name} on {part.mpmd_idxs}" for name, part in named)
        return f"MpmdArray(shape={self.shape}, dtype={self.dtype}, {ranges}, spec={self.spec}{state})"


class StackedMpmdKeyArray(StackedMpmdArray):
    """An array of keys, as ``MpmdKeyArray``."""


StackedMpmdArray._of_keys = StackedMpmdKeyArray
register_array_type(StackedMpmdArray, StackedMpmdKeyArray, values_of)
