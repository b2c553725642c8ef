"""Orbax's way to the groups: a handler of types that has groups write and read ``MpmdArray``s.

What is saved is an ordinary checkpoint of jax arrays. In ``serialize``, each group is asked to copy its
values to host memory, in order with the steps; nobody waits. When Orbax has made the directory, the groups
write, each process to a database of its own, and Orbax merges these when it commits the checkpoint.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np
from orbax.checkpoint import future as orbax_futures
from orbax.checkpoint import type_handlers

from mpmd.arguments.leaves import ArgumentLeaf
from mpmd.array import MpmdArray, StepFuture
from mpmd.checkpoint import orbax_internals
from mpmd.compat import key_impl_name
from mpmd.errors import CheckpointError, GroupDiedError
from mpmd.ir import Spec
from mpmd.keys import is_key, raw
from mpmd.mesh import GroupMesh
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Handle
from mpmd.runtime.storage import JsonSpec, StoredArray
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


class _Leaf(NamedTuple):
    """An array to save. ``handle`` is taken when it is asked for: later steps may take the array over."""

    array: MpmdArray
    handle: Handle
    info: type_handlers.ParamInfo
    args: type_handlers.SaveArgs


class _Part(NamedTuple):
    """What one group saves."""

    mpmd_idx: int
    copy: Handle
    copied: Future[None]
    leaves: list[_Leaf]


def registry() -> type_handlers.TypeHandlerRegistry:
    """Orbax's handlers of types, and one for ``MpmdArray``. Orbax's own, global registry stays as it is."""
    arrays = MpmdArrayHandler()
    others = [
        (kind, type_handlers.get_type_handler(kind))
        for kind in type_handlers.supported_types()
        if kind is not jax.Array
    ]
    return type_handlers.create_type_handler_registry((MpmdArray, arrays), (jax.Array, arrays), *others)


class MpmdArrayHandler(type_handlers.ArrayHandler):
    """Orbax's handler of jax arrays, which has groups save and restore ``MpmdArray``s.

    One handler for both, because both are noted in the same files.
    """

    def __init__(self) -> None:
        self._store = orbax_internals.metadata_store()
        super().__init__(array_metadata_store=self._store)

    async def serialize(
        self,
        values: Sequence[MpmdArray | jax.Array],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> Sequence[orbax_futures.Future]:
        """Asks groups to copy their values, and returns futures of all that is left to do.

        Raises: ``ValueError`` for arrays that were deleted, are empty or are on several meshes.
        """
        rows = list(zip(values, infos, args or [type_handlers.SaveArgs()] * len(values), strict=True))
        leaves = _checked([row for row in rows if isinstance(row[0], MpmdArray)])
        parts = _copy_out(leaves)
        local = [row for row in rows if not isinstance(row[0], MpmdArray)]
        futures = list(await super().serialize(*zip(*local, strict=True))) if local else []
        if leaves:
            writing = self._write(leaves, parts, tuple(futures))
            futures.append(
                orbax_futures.CommitFutureAwaitingContractedSignals(writing, name="mpmd_array_handler")
            )
        return futures

    async def _write(
        self, leaves: Sequence[_Leaf], parts: Sequence[_Part], before: Sequence[orbax_futures.Future]
    ) -> None:
        runtime, infos = leaves[0].array.runtime, [leaf.info for leaf in leaves]
        try:
            for info in infos:
                await info.await_path_creation()
            directory = infos[0].parent_dir
            what = f"write its part of the checkpoint {directory}"
            await _results({part.mpmd_idx: part.copied for part in parts}, what)
            specs = {part.mpmd_idx: _write_specs(part, runtime) for part in parts}
            writing = {
                part.mpmd_idx: _call(
                    runtime.write, part.mpmd_idx, part.copy, _opened_by(specs[part.mpmd_idx])
                )
                for part in parts
            }
            written = await _results(writing, what)
        finally:
            for part in parts:
                runtime.free((part.mpmd_idx,), part.copy)
        for mpmd_idx, sizes in written.items():
            _check_arrived(directory, mpmd_idx, sizes)
        for future in before:  # Orbax reads its files of metadata, and writes them with more in them
            await asyncio.to_thread(future.result)
        first = [spec.metadata for by_process in specs.values() for _, spec in by_process[0]]
        await self._store.write(directory, first, process_index=0)
        await orbax_internals.write_shardings(infos)

    async def deserialize(
        self,
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.RestoreArgs] | None = None,
    ) -> Sequence[MpmdArray | jax.Array]:
        """Waits until the groups have read what is to be there, and has Orbax read the rest.

        Raises: ``ValueError`` for arrays of other shapes or dtypes, ``CheckpointError``, ``GroupDiedError``.
        """
        args = args or [type_handlers.RestoreArgs()] * len(infos)
        there = [i for i, arg in enumerate(args) if isinstance(arg, GroupRestoreArgs)]
        here = [i for i in range(len(infos)) if i not in set(there)]
        restored: dict[int, MpmdArray | jax.Array] = {}
        if there:
            arrays = await self._read([infos[i] for i in there], [args[i] for i in there])
            restored |= zip(there, arrays, strict=True)
        if here:
            arrays = await super().deserialize([infos[i] for i in here], [args[i] for i in here])
            restored |= zip(here, arrays, strict=True)
        return [restored[i] for i in range(len(infos))]

    async def _read(
        self, infos: Sequence[type_handlers.ParamInfo], args: Sequence[GroupRestoreArgs]
    ) -> list[MpmdArray]:
        # Other than the handler of jax arrays, that of numpy arrays knows the shapes of Python numbers, too.
        _check_stored(infos, args, await type_handlers.NumpyHandler().metadata(infos))
        handles = [arg.runtime.next_handle() for arg in args]
        stored: dict[Runtime, dict[int, dict[Handle, StoredArray]]] = {}
        for info, arg, handle in zip(infos, args, handles, strict=True):
            array = StoredArray(orbax_internals.read_spec(info), raw(arg.aval).dtype, arg.spec)
            for mpmd_idx in arg.mpmd_idxs:
                stored.setdefault(arg.runtime, {}).setdefault(mpmd_idx, {})[handle] = array
        reading = {
            runtime: {i: _call(runtime.read, i, wanted) for i, wanted in by_group.items()}
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
        for futures in reading.values():
            await _results(futures, f"read its part of the checkpoint {infos[0].parent_dir}")
        return arrays


def _checked(rows: Sequence[tuple]) -> list[_Leaf]:
    """The leaves to save. Raises ``ValueError`` that lists all that cannot be saved."""
    leaves, faults = [], []
    for array, info, args in rows:
        if array.is_deleted():
            faults.append(f"{info.name} was deleted, or donated to a step; save that step's result")
        elif not array.size:
            faults.append(f"{info.name} has the shape {array.shape}; Orbax does not save empty arrays")
        elif not info.is_ocdbt_checkpoint:
            faults.append(f"{info.name} is on groups, which write Orbax's format OCDBT: leave use_ocdbt on")
        elif array.runtime is not rows[0][0].runtime:
            faults.append(
                f"{info.name} is on another mesh than {rows[0][1].name}; a mesh saves a checkpoint of its own"
            )
        else:
            leaves.append(_Leaf(array, array.handle, info, args))
    if faults:
        raise ValueError("this cannot be saved:\n" + "\n".join(faults))
    return leaves


def _copy_out(leaves: Sequence[_Leaf]) -> list[_Part]:
    """Asks groups to copy what they are to save; of an array on several groups, the first of them."""
    by_group: dict[int, list[_Leaf]] = collections.defaultdict(list)
    for leaf in leaves:
        by_group[leaf.array.mpmd_idxs[0]].append(leaf)
    parts = []
    for mpmd_idx, mine in sorted(by_group.items()):
        runtime = mine[0].array.runtime
        copy, handles = runtime.next_handle(), list(dict.fromkeys(leaf.handle for leaf in mine))
        parts.append(_Part(mpmd_idx, copy, _call(runtime.copy_out, mpmd_idx, copy, handles), mine))
    return parts


_ProcessSpecs = list[list[tuple[Handle, orbax_internals.WriteSpec]]]


def _write_specs(part: _Part, runtime: Runtime) -> _ProcessSpecs:
    """How each process of a group is to write its leaves."""
    return [
        [(leaf.handle, _write_spec(leaf, _writer(part.mpmd_idx, rank))) for leaf in part.leaves]
        for rank in range(runtime.processes_per_group[part.mpmd_idx])
    ]


def _write_spec(leaf: _Leaf, writer: str) -> orbax_internals.WriteSpec:
    array = leaf.array
    described = raw(array.aval)
    shard_shape = array.sharding.shard_shape(array.shape) + described.shape[array.ndim :]
    key_impl = key_impl_name(array.dtype) if is_key(array) else None
    return orbax_internals.write_spec(leaf.info, leaf.args, described, shard_shape, writer, key_impl)


def _opened_by(specs: _ProcessSpecs) -> list[list[tuple[Handle, JsonSpec]]]:
    return [[(handle, spec.opened_by) for handle, spec in by_process] for by_process in specs]


def _writer(mpmd_idx: int, rank: int) -> str:
    """A name of a process, of letters and digits."""
    return f"g{mpmd_idx}p{rank}"


def _check_arrived(directory: Any, mpmd_idx: int, sizes: Sequence[int]) -> None:
    """Raises ``CheckpointError`` when this process does not find what a group has written."""
    for rank, size in enumerate(sizes):
        found = directory / orbax_internals.process_directory(_writer(mpmd_idx, rank))
        if size and not found.exists():
            raise CheckpointError(
                f"group {mpmd_idx} has written its part of the checkpoint, but here there is no {found}: "
                "save to storage that the nodes of all groups and the driver share",
                mpmd_idx,
            )


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


def _call(method: Any, *arguments: Any) -> Future:
    """The future of a call on a group; a failed one where the call cannot be made."""
    try:
        return method(*arguments)
    except RuntimeError as error:  # the mesh was closed
        future: Future = Future()
        future.set_exception(error)
        return future


async def _results(futures: Mapping[int, Future], what: str) -> dict[int, Any]:
    """Waits for all groups. Raises the error of one of them, with its number and what it could not do."""
    errors = {i: await asyncio.to_thread(future.exception) for i, future in futures.items()}
    for mpmd_idx, error in errors.items():
        if isinstance(error, GroupDiedError):
            error.add_note(f"Group {mpmd_idx} was to {what}.")
            raise error
        if error is not None:
            message = f"group {mpmd_idx} could not {what}: {type(error).__name__}: {error}"
            raise CheckpointError(message, mpmd_idx) from error
    return {mpmd_idx: future.result() for mpmd_idx, future in futures.items()}
