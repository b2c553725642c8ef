"""Finds the spec of each leaf of a call: the user's spec, or else the spec of the passed array."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from mpmd.arguments.call import Call
from mpmd.arguments.specs import GroupAxes, input_specs
from mpmd.arrays.array import MpmdArray
from mpmd.ir.plan import Spec
from mpmd.ir.specs import num_shards
from mpmd.sharding import entries_of, to_spec


class SpecsOfCalls:
    """Finds the spec of each argument leaf of a call, as ``jax.jit`` finds its sharding.

    A leaf without a user's spec that has a ``NamedSharding``, or is an ``MpmdArray``, has the axes in its own
    spec that groups have. The compiler leaves the spec out where it does not divide the leaf.

    Args:
      in_specs: the user's specs of arguments that are passed by position; ``None``: there are none.
      of_keywords: the user's specs of arguments that are passed by name.
      submeshes: the shape of each group's submesh.
      mpmd_axis_name: the axis along which the groups are, if any.
    """

    def __init__(
        self,
        in_specs: Any,
        of_keywords: Mapping[str, Any] | None,
        submeshes: Sequence[AbstractMesh],
        mpmd_axis_name: str | None,
    ):
        self._in_specs = in_specs
        self._of_keywords = of_keywords
        self._is_open = in_specs is None and not of_keywords
        self.axes = GroupAxes(submeshes[0].axis_names, mpmd_axis_name)
        self._sizes = [dict(submesh.shape) for submesh in submeshes]
        self._can_shard = any(submesh.size > 1 for submesh in submeshes)
        self._explicit: dict[Any, tuple[Spec | None, ...]] = {}
        self._usable = functools.cache(self._find_usable)

    def are_asked(self, call: Call) -> tuple[bool, ...]:
        """Returns for each leaf whether its spec comes from the user, and not from the passed array."""
        return tuple(spec is not None for spec in self._explicit_specs(call))

    def of(self, call: Call) -> tuple[Spec | None, ...] | None:
        """The specs; ``None`` for a replicated leaf, or for all when nothing is given and all are replicated.

        Raises: ``CompileError`` that names every leaf whose given spec does not fit it.
        """
        if self._is_open and not self._can_shard:
            return None
        pairs = zip(self._explicit_specs(call), call.leaves, strict=True)
        specs = tuple(self._of_array(leaf) if spec is None else spec for spec, leaf in pairs)
        return None if self._is_open and not any(specs) else specs

    def _explicit_specs(self, call: Call) -> tuple[Spec | None, ...]:
        if self._is_open:
            return (None,) * len(call.leaves)
        specs_of_leaves = self._explicit.get(call.key)
        if specs_of_leaves is None:
            specs = input_specs(self._in_specs, call, self.axes, self._of_keywords)
            specs_of_leaves = self._explicit[call.key] = tuple(specs)
        return specs_of_leaves

    def _of_array(self, leaf: Any) -> Spec | None:
        if isinstance(leaf, MpmdArray):
            return self._usable(leaf.placement.spec)
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and isinstance(leaf.sharding, NamedSharding):
            return self._usable(leaf.sharding.spec)
        return None

    def _find_usable(self, spec: Spec | PartitionSpec) -> Spec | None:
        """An array's spec over the axes that groups have; ``None`` if it cuts nothing."""
        entries = entries_of(spec) if isinstance(spec, PartitionSpec) else spec
        usable = to_spec(PartitionSpec(*map(self._of_groups, entries)))
        return usable if any(num_shards(usable, sizes) > 1 for sizes in self._sizes) else None

    def _of_groups(self, entry: Any) -> tuple[str, ...] | str | None:
        if not isinstance(entry, tuple):
            return entry if entry in self.axes.names and entry != self.axes.mpmd_axis_name else None
        known = tuple(axis for axis in entry if self._of_groups(axis))
        return known or None
