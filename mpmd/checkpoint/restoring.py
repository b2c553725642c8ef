"""Restoring arrays: shapes and dtypes are compared, and each group is asked to read what is to be there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import type_handlers

from mpmd.arguments.leaves import ArgumentLeaf
from mpmd.array import MpmdArray, StepFuture
from mpmd.checkpoint import orbax_internals
from mpmd.checkpoint.group_calls import call, results
from mpmd.ir import Spec
from mpmd.keys import raw
from mpmd.mesh import GroupMesh
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Handle
from mpmd.runtime.storage import StoredArray
from mpmd.sharding import to_spec


@dataclasses.dataclass
class GroupRestoreArgs(type_handlers.RestoreArgs):
    """Asks Orbax to restore an array onto groups; made by ``mpmd.checkpoint.restore_args``.

    Attributes:
      aval: shape, dtype and weak type.
      mpmd_idxs: the groups.
      spec: how it is sharded over a group's submesh; replicated where that does not divide.
      submesh: that of the first group.
      runtime: runs the groups.
    """

    restore_type: Any = MpmdArray
    aval: jax.ShapeDtypeStruct = dataclasses.field(kw_only=True)
    mpmd_idxs: tuple[int, ...] = dataclasses.field(kw_only=True)
    spec: Spec = dataclasses.field(kw_only=True)
    submesh: jax.sharding.AbstractMesh = dataclasses.field(kw_only=True)
    runtime: Runtime = dataclasses.field(kw_only=True)

    @classmethod
    def of_array(cls, array: MpmdArray) -> GroupRestoreArgs:
        """To where an array is, or was."""
        submesh: Any = array.sharding.mesh
        return cls(
            aval=array.aval,
            mpmd_idxs=array.mpmd_idxs,
            spec=to_spec(array.spec),
            submesh=submesh,
            runtime=array.runtime,
        )

    @classmethod
    def of_leaf(cls, leaf: ArgumentLeaf, mesh: GroupMesh) -> GroupRestoreArgs:
        """To where a step reads a leaf of an argument."""
        submesh = mesh.abstract_submeshes[leaf.mpmd_idxs[0]]
        return cls(
            aval=leaf.aval,
            mpmd_idxs=leaf.mpmd_idxs,
            spec=leaf.spec,
            submesh=submesh,
            runtime=mesh.runtime,
        )


async def read(infos: Sequence[type_handlers.ParamInfo], args: Sequence[GroupRestoreArgs]) -> list[MpmdArray]:
    """Has groups read arrays, and waits until they have.

    Raises: ``ValueError`` for arrays of other shapes or dtypes, ``CheckpointError``, ``GroupDiedError``.
    """
    # Other than the handler of jax arrays, that of numpy arrays knows the shapes of Python numbers, too.
    _check_stored(infos, args, await type_handlers.NumpyHandler().metadata(infos))
    handles = [arg.runtime.next_handle() for arg in args]
    stored: dict[Runtime, dict[int, dict[Handle, StoredArray]]] = {}
    for info, arg, handle in zip(infos, args, handles, strict=True):
        array = StoredArray(orbax_internals.read_spec(info), raw(arg.aval).dtype, arg.spec)
        for mpmd_idx in arg.mpmd_idxs:
            stored.setdefault(arg.runtime, {}).setdefault(mpmd_idx, {})[handle] = array
    reading = {
        runtime: {i: call(runtime.read, i, wanted) for i, wanted in by_group.items()}
        for runtime, by_group in stored.items()
    }
    arrays = [
        MpmdArray(
            aval=arg.aval,
            mpmd_idxs=arg.mpmd_idxs,
            spec=arg.spec,
            submesh=arg.submesh,
            runtime=arg.runtime,
            handle=handle,
            future=StepFuture({i: reading[arg.runtime][i] for i in arg.mpmd_idxs}),
        )
        for arg, handle in zip(args, handles, strict=True)
    ]
    for runtime, futures in reading.items():
        await results(futures, f"read its part of the checkpoint {infos[0].parent_dir}")
        runtime.last_checkpoint = str(infos[0].parent_dir)
    return arrays


def _check_stored(
    infos: Sequence[type_handlers.ParamInfo], args: Sequence[GroupRestoreArgs], metadatas: Sequence[Any]
) -> None:
    """Raises ``ValueError`` that lists the arrays which are stored in other shapes or dtypes."""
    faults = []
    for info, arg, stored in zip(infos, args, metadatas, strict=True):
        wanted = raw(arg.aval)
        if stored.shape != wanted.shape or not _is_readable_as(stored, wanted.dtype):
            faults.append(
                f"{info.name} is {stored.dtype}{list(stored.shape)} in the checkpoint, "
                f"not {wanted.dtype}{list(wanted.shape)}"
            )
    if faults:
        raise ValueError("the checkpoint is of another state:\n" + "\n".join(faults))


def _is_readable_as(stored: Any, dtype: np.dtype) -> bool:
    """Whether values are stored in a dtype, or are a Python number, which has the widest of its kind."""
    of_python = stored.shape == () and stored.dtype.name in ("int64", "float64")
    return stored.dtype == dtype or (of_python and stored.dtype.kind == dtype.kind)
