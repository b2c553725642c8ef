"""Restoring arrays: shapes and dtypes are compared, and each group is asked to read what is to be there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
from orbax.checkpoint import type_handlers

from mpmd.arguments.leaves import ArgumentLeaf
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.stacked_array import StackedMpmdArray
from mpmd.checkpoint import orbax_internals
from mpmd.checkpoint.group_calls import call, results
from mpmd.ir.placement import Placement
from mpmd.ir.plan import Spec
from mpmd.keys import raw
from mpmd.meshes.mesh import GroupMesh
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Handle
from mpmd.runtime.step_future import StepFuture
from mpmd.runtime.storage import JsonSpec, StoredArray, part_of


@dataclasses.dataclass
class GroupRestoreArgs(type_handlers.RestoreArgs):
    """Asks Orbax to restore an array onto groups; made by ``mpmd.checkpoint.restore_args``.

    Attributes:
      aval: shape, dtype and weak type.
      placement: the groups, how it is sharded over the submesh of each, replicated where that does not
        divide, and in which parts.
      submeshes: for each part, those of its groups.
      runtime: runs the groups.
    """

    restore_type: Any = MpmdArray
    aval: jax.ShapeDtypeStruct = dataclasses.field(kw_only=True)
    placement: Placement = dataclasses.field(kw_only=True)
    submeshes: tuple[tuple[jax.sharding.AbstractMesh, ...], ...] = dataclasses.field(kw_only=True)
    runtime: Runtime = dataclasses.field(kw_only=True)

    @classmethod
    def of_array(cls, array: MpmdArray) -> GroupRestoreArgs:
        """To where an array is, or was."""
        return cls(
            aval=array.aval,
            placement=array.placement,
            submeshes=tuple(part.submeshes for part in array.parts),
            runtime=array.runtime,
        )

    @classmethod
    def of_leaf(cls, leaf: ArgumentLeaf, mesh: GroupMesh) -> GroupRestoreArgs:
        """To where a step reads a leaf of an argument."""
        return cls(
            aval=leaf.aval,
            placement=leaf.placement,
            submeshes=tuple(
                tuple(mesh.abstract_submeshes[group] for group in part.mpmd_idxs)
                for part in leaf.placement.parts
            ),
            runtime=mesh.runtime,
        )

    def parts(self, opened_by: JsonSpec) -> list[_Part]:
        """What groups are to read.

        Args:
          opened_by: what TensorStore opens the array by.
        """
        stack, described = self.placement.stack, raw(self.aval)
        if stack is None:
            return [_Part(self.aval, self.placement, StoredArray(opened_by, described.dtype, self.spec))]
        parts = []
        places = zip(stack.shapes(self.aval.shape), stack.slices, self.placement.parts, strict=True)
        for shape, part, place in places:
            aval = jax.ShapeDtypeStruct(shape, self.aval.dtype, weak_type=self.aval.weak_type)
            start = [part.start if dim == stack.axis else 0 for dim in range(len(described.shape))]
            opened = part_of(opened_by, start, raw(aval).shape)
            parts.append(_Part(aval, place, StoredArray(opened, described.dtype, self.spec)))
        return parts

    @property
    def spec(self) -> Spec:
        return self.placement.spec or ()


class _Part(NamedTuple):
    """An array that groups read, or the part of one that some of them read."""

    aval: jax.ShapeDtypeStruct
    placement: Placement
    stored: StoredArray


async def read(infos: Sequence[type_handlers.ParamInfo], args: Sequence[GroupRestoreArgs]) -> list[MpmdArray]:
    """Has groups read arrays, and waits until they have.

    Raises: ``CheckpointError``, ``GroupDiedError``.
    """
    parts = [arg.parts(orbax_internals.read_spec(info)) for info, arg in zip(infos, args, strict=True)]
    handles = [[arg.runtime.next_handle() for _ in own] for arg, own in zip(args, parts, strict=True)]
    stored: dict[Runtime, dict[int, dict[Handle, StoredArray]]] = {}
    for arg, own, names in zip(args, parts, handles, strict=True):
        for part, handle in zip(own, names, strict=True):
            for mpmd_idx in part.placement.mpmd_idxs:
                stored.setdefault(arg.runtime, {}).setdefault(mpmd_idx, {})[handle] = part.stored
    reading = {
        runtime: {i: call(runtime.read, i, wanted) for i, wanted in by_group.items()}
        for runtime, by_group in stored.items()
    }
    arrays = [
        _array(arg, own, names, reading[arg.runtime])
        for arg, own, names in zip(args, parts, handles, strict=True)
    ]
    for runtime, futures in reading.items():
        await results(futures, f"read its part of the checkpoint {infos[0].parent_dir}")
        runtime.last_checkpoint = str(infos[0].parent_dir)
    return arrays


def _array(
    arg: GroupRestoreArgs, parts: Sequence[_Part], handles: Sequence[Handle], reading: Mapping[int, Future]
) -> MpmdArray:
    """The array of what groups are reading."""
    arrays = tuple(
        MpmdArray(
            aval=part.aval,
            mpmd_idxs=part.placement.mpmd_idxs,
            spec=arg.spec,
            submeshes=submeshes,
            runtime=arg.runtime,
            handle=handle,
            future=StepFuture({i: reading[i] for i in part.placement.mpmd_idxs}),
        )
        for part, submeshes, handle in zip(parts, arg.submeshes, handles, strict=True)
    )
    stack = arg.placement.stack
    return arrays[0] if stack is None else StackedMpmdArray(arg.aval, stack, arrays)
