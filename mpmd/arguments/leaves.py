"""Single leaves of a step's arguments: their shape and dtype, and their value on the host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpmd.arrays.array import MpmdArray
from mpmd.ir.placement import Placement
from mpmd.ir.plan import InputLeaf, Spec
from mpmd.ir.stack import Stack
from mpmd.keys import encode


class ArgumentLeaf(jax.ShapeDtypeStruct):
    """A leaf of an argument, as a compiled step reads it: its shape, dtype and weak type, and its groups.

    It is a ``jax.ShapeDtypeStruct``, because some libraries' pytrees take only arrays and
    ``ShapeDtypeStruct``s.

    Attributes:
      path: its name to users, e.g. ``args[0]['w']``.
      placement: the groups that read it, and its layer ranges; group 0 if the step does not read it.
    """

    path: str
    placement: Placement

    def __init__(self, path: str, aval: jax.ShapeDtypeStruct, placement: Placement):
        super().__init__(aval.shape, aval.dtype, weak_type=aval.weak_type)
        self.path = path
        self.placement = placement

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Its shape, dtype and weak type alone."""
        return as_described(self)

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """The groups that read the leaf, or one of its layer ranges."""
        return self.placement.mpmd_idxs

    @property
    def spec(self) -> Spec:
        """The spec over each group's submesh; ``()`` if no spec is known."""
        return self.placement.spec or ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArgumentLeaf) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"ArgumentLeaf({self.path!r}, {self.aval}, {self.placement})"

    __str__ = __repr__

    @property
    def _key(self) -> tuple[str, jax.ShapeDtypeStruct, Placement]:
        return self.path, self.aval, self.placement


def describe(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and weak type of an argument leaf. Raises ``TypeError`` when it is not an array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        is_bare = type(leaf) is jax.ShapeDtypeStruct and leaf.sharding is None
        return leaf if is_bare else as_described(leaf)
    if isinstance(leaf, MpmdArray):
        return leaf.aval
    return as_described(jax.typeof(leaf))


def as_described(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def fault_of(path: str, leaf: Any) -> str | None:
    try:
        describe(leaf)
    except TypeError:
        pass
    else:
        return None
    if not isinstance(leaf, np.ndarray | np.generic):
        return f"{path} is a {type(leaf).__name__}, not an array or a number; {_instead_of(path, leaf)}"
    advice = "convert it to numbers, or leave it out of the step's arguments"
    if leaf.dtype == object:
        advice += "; numpy makes such an array of rows of different lengths"
    return f"{path} is an array of dtype {leaf.dtype}, and JAX computes with numbers only: {advice}"


def _instead_of(path: str, leaf: Any) -> str:
    """Advice for a leaf that is no array: functions are often leaves of a model."""
    if not callable(leaf) or re.fullmatch(r"args\[\d+\]|kwargs\['\w+'\]", path):
        return "name its argument in static_argnums or static_argnames if the step depends on it"
    return (
        "pass the arrays of its argument alone, and put the rest back in the step: of an equinox model, "
        "`arrays, rest = eqx.partition(model, eqx.is_array)` before the call, and "
        "`eqx.combine(arrays, rest)` in the step"
    )


def host_value(leaf: Any, described: jax.ShapeDtypeStruct, donated: bool) -> np.ndarray:
    """An argument leaf as a numpy array to which nobody will write; of keys, the integers inside.

    It is a view of the leaf where the leaf cannot change or be deleted, and a copy otherwise.
    """
    if isinstance(leaf, MpmdArray):
        return leaf.raw_value()
    if isinstance(leaf, np.ndarray):
        return np.array(leaf, dtype=described.dtype)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(f"an argument is {leaf}, which has no value: pass an array; lower takes shapes")
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf, dtype=described.dtype)
    return np.array(encode(leaf), copy=donated or None)


def placement_of(stack: Stack | None, ranges: Sequence[InputLeaf], first: int) -> Placement:
    """The placement in which a step reads a leaf; the group ``first`` for a leaf that it does not read."""
    spec = next((layers.spec for layers in ranges if layers.mpmd_idxs), ())
    range_idxs = tuple(layers.mpmd_idxs or (first,) for layers in ranges)
    return Placement(range_idxs[0], spec) if stack is None else Placement.of_ranges(stack, range_idxs, spec)
