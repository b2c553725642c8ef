"""Saving arrays: groups copy and write them, and the driver checks that all files have arrived."""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

from mpmd.arrays.array import MpmdArray
from mpmd.checkpoint import orbax_internals
from mpmd.checkpoint.group_calls import ask, results
from mpmd.compat import key_impl_name
from mpmd.errors import CheckpointError
from mpmd.keys import encode, is_key, raw
from mpmd.runtime import storage
from mpmd.runtime.requests import CopyOut, Handle, JsonSpec, Write
from mpmd.runtime.storage import HostShard, copied_out, region_of
from mpmd.util.grouping import grouped

Row = tuple[Any, type_handlers.ParamInfo, type_handlers.SaveArgs]

LOCAL_WRITER = "driver"
"""The name of the driver's process beside the names of the groups' processes, such as ``g0p1``."""


class SavedLeaf(NamedTuple):
    """An array on groups to save, or a layer range of an array.

    Attributes:
      whole: the array that is saved.
      array: ``whole`` itself, or the layer range of ``whole`` that begins at the layer ``first``.
      handle: the handle of ``array`` at the time of the request: later steps may take the array over.
    """

    whole: MpmdArray
    array: MpmdArray
    first: int
    handle: Handle
    chunk_shape: tuple[int, ...]
    info: type_handlers.ParamInfo
    args: type_handlers.SaveArgs


class GroupCopy(NamedTuple):
    mpmd_idx: int
    copy: Handle
    copied: Future[None]
    leaves: list[SavedLeaf]


class LocalLeaf(NamedTuple):
    """A jax array of this process to save.

    Attributes:
      array: the array; an array of keys as integers.
      copy: the value at the time of the request: later steps may take the array over.
      key_impl: the generator of an array of keys; ``None`` for numbers.
    """

    array: jax.Array
    copy: tuple[HostShard, ...]
    key_impl: str | None
    info: type_handlers.ParamInfo
    args: type_handlers.SaveArgs


def leaves_to_save(rows: Sequence[Row]) -> list[SavedLeaf]:
    """The leaves of arrays on groups, one for each layer range. Each chunk is in one shard of one range."""
    leaves = []
    for array, info, args in rows:
        stack, ranges = array.placement.stack, array.parts
        shards = [NamedSharding(layers.submesh, layers.spec).shard_shape(layers.shape) for layers in ranges]
        chunk = tuple(map(math.gcd, *shards)) if stack else shards[0]
        starts = [layers.start for layers in stack.slices] if stack else [0]
        leaves += [
            SavedLeaf(array, layers, first, layers.handle, chunk, info, args)
            for layers, first in zip(ranges, starts, strict=True)
        ]
    return leaves


def local_leaves(rows: Sequence[Row]) -> list[LocalLeaf]:
    leaves = []
    for array, info, args in rows:
        key_impl = key_impl_name(array.dtype) if is_key(array) else None
        integers = encode(array)
        leaves.append(LocalLeaf(integers, copied_out(integers), key_impl, info, args))
    return leaves


def copy_out(leaves: Sequence[SavedLeaf]) -> list[GroupCopy]:
    """Asks groups to copy the arrays that they save; the first of an array's groups saves the array."""
    by_group = grouped((leaf.array.mpmd_idxs[0], leaf) for leaf in leaves)
    copies = []
    for mpmd_idx, mine in sorted(by_group.items()):
        runtime = mine[0].array.runtime
        copy, handles = runtime.next_handle(), tuple(dict.fromkeys(leaf.handle for leaf in mine))
        copied = ask(runtime, mpmd_idx, CopyOut(copy, handles))
        copies.append(GroupCopy(mpmd_idx, copy, copied, mine))
    return copies


async def write_local(leaves: Sequence[LocalLeaf]) -> list[Any]:
    """Writes the copies of this process.

    Returns: Orbax's metadata of each array.
    """
    for leaf in leaves:
        await leaf.info.await_path_creation()
    specs = []
    for leaf in leaves:
        array = leaf.array
        shard = array.sharding.shard_shape(array.shape)
        described = jax.ShapeDtypeStruct(array.shape, array.dtype)
        specs.append(
            orbax_internals.write_spec(leaf.info, leaf.args, described, shard, LOCAL_WRITER, leaf.key_impl)
        )
    copies = {number: leaf.copy for number, leaf in enumerate(leaves)}
    opened_by = [(number, spec.opened_by) for number, spec in enumerate(specs)]
    await asyncio.to_thread(storage.write, copies, opened_by)
    return [spec.metadata for spec in specs]


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
        metadata: dict[str, Any] = {}
        opened_by: dict[int, list[list[tuple[Handle, JsonSpec]]]] = collections.defaultdict(list)
        for group_copy in copies:
            mpmd_idx = group_copy.mpmd_idx
            for rank in range(runtime.processes_per_group[mpmd_idx]):
                specs = [_write_spec(leaf, _writer(mpmd_idx, rank)) for leaf in group_copy.leaves]
                rows = list(zip(group_copy.leaves, specs, strict=True))
                opened_by[mpmd_idx].append([(leaf.handle, spec.opened_by) for leaf, spec in rows])
                metadata |= {leaf.info.name: spec.metadata for leaf, spec in rows}
        writing = {
            (i := group_copy.mpmd_idx): ask(runtime, i, Write(group_copy.copy, opened_by[i]))
            for group_copy in copies
        }
        written = await results(writing, what)
    finally:
        for group_copy in copies:
            runtime.free((group_copy.mpmd_idx,), group_copy.copy)
    for mpmd_idx, sizes in written.items():
        _check_arrived(directory, mpmd_idx, sizes)
    return list(metadata.values())


def _write_spec(leaf: SavedLeaf, writer: str) -> orbax_internals.WriteSpec:
    whole, layers, stack = leaf.whole, leaf.array, leaf.whole.placement.stack
    described, of_range = raw(whole.aval), raw(layers.aval)
    chunk_shape = leaf.chunk_shape + described.shape[whole.ndim :]
    key_impl = key_impl_name(whole.dtype) if is_key(whole) else None
    spec = orbax_internals.write_spec(leaf.info, leaf.args, described, chunk_shape, writer, key_impl)
    if stack is None:
        return spec
    start = [leaf.first if dim == stack.axis else 0 for dim in range(len(of_range.shape))]
    return spec._replace(opened_by=region_of(spec.opened_by, start, of_range.shape))


def _writer(mpmd_idx: int, rank: int) -> str:
    return f"g{mpmd_idx}p{rank}"


def _check_arrived(directory: Any, mpmd_idx: int, sizes: Sequence[int]) -> None:
    for rank, size in enumerate(sizes):
        written = directory / orbax_internals.process_directory(_writer(mpmd_idx, rank))
        if size and not written.exists():
            raise CheckpointError(
                f"group {mpmd_idx} has written its part of the checkpoint, but here there is no {written}: "
                "save to storage that the nodes of all groups and the driver share",
                mpmd_idx,
            )
