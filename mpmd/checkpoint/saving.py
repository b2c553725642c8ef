"""Saving arrays: groups copy and write them, and the driver checks that all files have arrived."""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

from mpmd.arrays.array import MpmdArray
from mpmd.checkpoint import orbax_internals
from mpmd.checkpoint.group_calls import call, results
from mpmd.compat import key_impl_name
from mpmd.errors import CheckpointError
from mpmd.keys import encode, is_key, raw
from mpmd.runtime import storage
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Handle
from mpmd.runtime.storage import HostShard, JsonSpec, copied_out, region_of

Row = tuple[Any, type_handlers.ParamInfo, type_handlers.SaveArgs]
"""An array, and Orbax's arguments for it."""

LOCAL_WRITER = "driver"
"""The name of this process among those that write."""


class Leaf(NamedTuple):
    """An array to save, or a layer range of one.

    Attributes:
      whole: the array that is saved.
      array: itself, or the layer range of it, which begins at the layer ``first``.
      handle: taken when it is asked for: later steps may take the array over.
      chunk_shape: in which ``whole`` is written.
    """

    whole: MpmdArray
    array: MpmdArray
    first: int
    handle: Handle
    chunk_shape: tuple[int, ...]
    info: type_handlers.ParamInfo
    args: type_handlers.SaveArgs


class GroupCopy(NamedTuple):
    """The copies of the arrays that one group saves."""

    mpmd_idx: int
    copy: Handle
    copied: Future[None]
    leaves: list[Leaf]


class LocalLeaf(NamedTuple):
    """A jax array of this process to save.

    Attributes:
      array: as integers, if it has keys.
      copy: the value at the time of the request: later steps may take the array over.
      key_impl: the generator of keys; ``None`` of other arrays.
    """

    array: jax.Array
    copy: tuple[HostShard, ...]
    key_impl: str | None
    info: type_handlers.ParamInfo
    args: type_handlers.SaveArgs


def leaves_to_save(rows: Sequence[Row]) -> list[Leaf]:
    """The leaves to save, of arrays on groups and Orbax's arguments for each."""
    return [leaf for row in rows for leaf in _leaves_of(*row)]


def local_leaves(rows: Sequence[Row]) -> list[LocalLeaf]:
    """The leaves to save, of arrays of this process, which are copied to host memory."""
    leaves = []
    for array, info, args in rows:
        key_impl = key_impl_name(array.dtype) if is_key(array) else None
        integers = encode(array)
        leaves.append(LocalLeaf(integers, copied_out(integers), key_impl, info, args))
    return leaves


def _leaves_of(
    array: MpmdArray, info: type_handlers.ParamInfo, args: type_handlers.SaveArgs
) -> Iterator[Leaf]:
    """The leaves of an array, one for each layer range. A chunk is in one shard of one range."""
    stack, ranges = array.placement.stack, array.parts
    shards = [NamedSharding(layers.submesh, layers.spec).shard_shape(layers.shape) for layers in ranges]
    chunk = tuple(map(math.gcd, *shards)) if stack else shards[0]
    starts = [layers.start for layers in stack.slices] if stack else [0]
    for layers, first in zip(ranges, starts, strict=True):
        yield Leaf(array, layers, first, layers.handle, chunk, info, args)


def copy_out(leaves: Sequence[Leaf]) -> list[GroupCopy]:
    """Asks groups to copy the arrays that they save; of an array on several groups, the first group."""
    by_group: dict[int, list[Leaf]] = collections.defaultdict(list)
    for leaf in leaves:
        by_group[leaf.array.mpmd_idxs[0]].append(leaf)
    copies = []
    for mpmd_idx, mine in sorted(by_group.items()):
        runtime = mine[0].array.runtime
        copy, handles = runtime.next_handle(), list(dict.fromkeys(leaf.handle for leaf in mine))
        copies.append(GroupCopy(mpmd_idx, copy, call(runtime.copy_out, mpmd_idx, copy, handles), mine))
    return copies


async def write_local(leaves: Sequence[LocalLeaf]) -> list[Any]:
    """Writes the copies of this process.

    Returns: Orbax's metadata of each array.
    """
    for leaf in leaves:
        await leaf.info.await_path_creation()
    specs = [_local_spec(leaf) for leaf in leaves]
    copies = {number: leaf.copy for number, leaf in enumerate(leaves)}
    opened_by = [(number, spec.opened_by) for number, spec in enumerate(specs)]
    await asyncio.to_thread(storage.write, copies, opened_by)
    return [spec.metadata for spec in specs]


def _local_spec(leaf: LocalLeaf) -> orbax_internals.WriteSpec:
    array = leaf.array
    shard = array.sharding.shard_shape(array.shape)
    described = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return orbax_internals.write_spec(leaf.info, leaf.args, described, shard, LOCAL_WRITER, leaf.key_impl)


async def write(copies: Sequence[GroupCopy]) -> list[Any]:
    """Asks groups to write their copies, and waits until they have.

    Returns: Orbax's metadata of each array.
    Raises: ``CheckpointError``, ``GroupDiedError``.
    """
    runtime = copies[0].leaves[0].array.runtime
    infos = [leaf.info for group_copy in copies for leaf in group_copy.leaves]
    try:
        for info in infos:
            await info.await_path_creation()
        directory = infos[0].parent_dir
        what = f"write its part of the checkpoint {directory}"
        await results({group_copy.mpmd_idx: group_copy.copied for group_copy in copies}, what)
        specs = {group_copy.mpmd_idx: _write_specs(group_copy, runtime) for group_copy in copies}
        writing = {
            group_copy.mpmd_idx: call(
                runtime.write, group_copy.mpmd_idx, group_copy.copy, _opened_by(specs[group_copy.mpmd_idx])
            )
            for group_copy in copies
        }
        written = await results(writing, what)
    finally:
        for group_copy in copies:
            runtime.free((group_copy.mpmd_idx,), group_copy.copy)
    for mpmd_idx, sizes in written.items():
        _check_arrived(directory, mpmd_idx, sizes)
    metadata = {
        leaf.info.name: spec.metadata
        for group_copy in copies
        for leaf, (_, spec) in zip(group_copy.leaves, specs[group_copy.mpmd_idx][0], strict=True)
    }
    return list(metadata.values())


_ProcessSpecs = list[list[tuple[Handle, orbax_internals.WriteSpec]]]


def _write_specs(group_copy: GroupCopy, runtime: Runtime) -> _ProcessSpecs:
    """The specifications by which each process of a group writes its leaves."""
    return [
        [(leaf.handle, _write_spec(leaf, _writer(group_copy.mpmd_idx, rank))) for leaf in group_copy.leaves]
        for rank in range(runtime.processes_per_group[group_copy.mpmd_idx])
    ]


def _write_spec(leaf: Leaf, writer: str) -> orbax_internals.WriteSpec:
    whole, layers, stack = leaf.whole, leaf.array, leaf.whole.placement.stack
    described, of_range = raw(whole.aval), raw(layers.aval)
    chunk_shape = leaf.chunk_shape + described.shape[whole.ndim :]
    key_impl = key_impl_name(whole.dtype) if is_key(whole) else None
    spec = orbax_internals.write_spec(leaf.info, leaf.args, described, chunk_shape, writer, key_impl)
    if stack is None:
        return spec
    start = [leaf.first if dim == stack.axis else 0 for dim in range(len(of_range.shape))]
    return spec._replace(opened_by=region_of(spec.opened_by, start, of_range.shape))


def _opened_by(specs: _ProcessSpecs) -> list[list[tuple[Handle, JsonSpec]]]:
    return [[(handle, spec.opened_by) for handle, spec in by_process] for by_process in specs]


def _writer(mpmd_idx: int, rank: int) -> str:
    """A name of a process, of letters and digits."""
    return f"g{mpmd_idx}p{rank}"


def _check_arrived(directory: Any, mpmd_idx: int, sizes: Sequence[int]) -> None:
    """Raises ``CheckpointError`` when this process does not find the files that a group has written."""
    for rank, size in enumerate(sizes):
        written = directory / orbax_internals.process_directory(_writer(mpmd_idx, rank))
        if size and not written.exists():
            raise CheckpointError(
                f"group {mpmd_idx} has written its part of the checkpoint, but here there is no {written}: "
                "save to storage that the nodes of all groups and the driver share",
                mpmd_idx,
            )
