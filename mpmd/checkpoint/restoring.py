"""Restores arrays: the driver asks each group to read its values from storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
from orbax.checkpoint import type_handlers

from mpmd.arguments.leaves import ArgumentLeaf
from mpmd.arrays.array import Held, MpmdArray
from mpmd.arrays.stacked_array import StackedMpmdArray
from mpmd.checkpoint import orbax_internals
from mpmd.checkpoint.group_calls import ask, results
from mpmd.ir.placement import Placement
from mpmd.ir.plan import Spec
from mpmd.keys import raw
from mpmd.meshes.group_mesh import GroupMesh
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Handle, JsonSpec, Read, StoredArray
from mpmd.runtime.step_future import StepFuture
from mpmd.runtime.storage import region_of


@dataclasses.dataclass
class GroupRestoreArgs(type_handlers.RestoreArgs):
    """Asks Orbax to restore an array onto groups; ``mpmd.checkpoint.restore_args`` returns such requests.

    Attributes:
      aval: shape, dtype and weak type.
      placement: the groups, the layer ranges, and the spec over the submesh of each group, on which an array
        that does not divide is replicated.
      submeshes: for each layer range, the submeshes of its groups.
      runtime: the runtime of the groups.
    """

    restore_type: Any = MpmdArray
    aval: jax.ShapeDtypeStruct = dataclasses.field(kw_only=True)
    placement: Placement = dataclasses.field(kw_only=True)
    submeshes: tuple[tuple[jax.sharding.AbstractMesh, ...], ...] = dataclasses.field(kw_only=True)
    runtime: Runtime = dataclasses.field(kw_only=True)

    @classmethod
    def of_array(cls, array: MpmdArray) -> GroupRestoreArgs:
        """The request to restore to the placement of an array, which may be deleted."""
        return cls(
            aval=array.aval,
            placement=array.placement,
            submeshes=tuple(layers.submeshes for layers in array.parts),
            runtime=array.runtime,
        )

    @classmethod
    def of_leaf(cls, leaf: ArgumentLeaf, mesh: GroupMesh) -> GroupRestoreArgs:
        if (last := max(leaf.placement.mpmd_idxs)) >= len(mesh.abstract_submeshes):
            count = len(mesh.abstract_submeshes)
            raise ValueError(f"{leaf.path} is on group {last} of its step, and the mesh has {count} groups")
        return cls(
            aval=leaf.aval,
            placement=leaf.placement,
            submeshes=tuple(
                tuple(mesh.abstract_submeshes[group] for group in layers.mpmd_idxs)
                for layers in leaf.placement.ranges
            ),
            runtime=mesh.runtime,
        )

    def ranges(self, opened_by: JsonSpec) -> list[_RangeToRead]:
        stack, described = self.placement.stack, raw(self.aval)
        if stack is None:
            return [
                _RangeToRead(self.aval, self.placement, StoredArray(opened_by, described.dtype, self.spec))
            ]
        ranges = []
        cut = zip(stack.shapes(self.aval.shape), stack.slices, self.placement.ranges, strict=True)
        for shape, layers, placement in cut:
            aval = jax.ShapeDtypeStruct(shape, self.aval.dtype, weak_type=self.aval.weak_type)
            start = [layers.start if dim == stack.axis else 0 for dim in range(len(described.shape))]
            opened = region_of(opened_by, start, raw(aval).shape)
            ranges.append(_RangeToRead(aval, placement, StoredArray(opened, described.dtype, self.spec)))
        return ranges

    @property
    def spec(self) -> Spec:
        return self.placement.spec or ()


class _RangeToRead(NamedTuple):
    aval: jax.ShapeDtypeStruct
    placement: Placement
    stored: StoredArray


async def read(infos: Sequence[type_handlers.ParamInfo], args: Sequence[GroupRestoreArgs]) -> list[MpmdArray]:
    """Asks groups to read arrays, and waits until they have.

    Raises: ``CheckpointError``, ``GroupDiedError``.
    """
    ranges_of = [arg.ranges(orbax_internals.read_spec(info)) for info, arg in zip(infos, args, strict=True)]
    handles = [
        [arg.runtime.next_handle() for _ in ranges] for arg, ranges in zip(args, ranges_of, strict=True)
    ]
    stored: dict[Runtime, dict[int, dict[Handle, StoredArray]]] = {}
    for arg, ranges, names in zip(args, ranges_of, handles, strict=True):
        for layers, handle in zip(ranges, names, strict=True):
            for mpmd_idx in layers.placement.mpmd_idxs:
                stored.setdefault(arg.runtime, {}).setdefault(mpmd_idx, {})[handle] = layers.stored
    reading = {
        runtime: {i: ask(runtime, i, Read(arrays)) for i, arrays in by_group.items()}
        for runtime, by_group in stored.items()
    }
    arrays = [
        _array(arg, ranges, names, reading[arg.runtime])
        for arg, ranges, names in zip(args, ranges_of, handles, strict=True)
    ]
    for runtime, futures in reading.items():
        await results(futures, f"read its part of the checkpoint {infos[0].parent_dir}")
        runtime.last_checkpoint = str(infos[0].parent_dir)
    return arrays


def _array(
    arg: GroupRestoreArgs,
    ranges: Sequence[_RangeToRead],
    handles: Sequence[Handle],
    reading: Mapping[int, Future],
) -> MpmdArray:
    """The array, which is complete when the groups in ``reading`` have replied."""
    arrays = tuple(
        MpmdArray(
            layers.aval,
            arg.runtime,
            Held(
                layers.placement,
                submeshes,
                handle,
                StepFuture({i: reading[i] for i in layers.placement.mpmd_idxs}),
            ),
        )
        for layers, submeshes, handle in zip(ranges, arg.submeshes, handles, strict=True)
    )
    stack = arg.placement.stack
    return arrays[0] if stack is None else StackedMpmdArray(arg.aval, stack, arrays)
