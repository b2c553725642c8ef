"""Copies a process's shards of a group's values to the host, and writes and reads them by TensorStore.

TensorStore is imported when it is used, because programs without checkpoints need not have it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpmd.ir.specs import fitting
from mpmd.runtime.requests import Handle, JsonSpec, StoredArray
from mpmd.sharding import to_sharding

Region = tuple[Any, ...]
"""A slice for each dimension."""

_CONTEXT = {
    "file_io_concurrency": {"limit": 32},
    "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},  # which the specs name, for the nodes of a tree
}


class HostShard(NamedTuple):
    region: Region
    data: np.ndarray


def region_of(opened_by: JsonSpec, start: Sequence[int], shape: Sequence[int]) -> JsonSpec:
    """TensorStore's specification of a region of an array, as an array of its own.

    Args:
      start: the first index of the region, for each dimension.
    """
    output = [{"input_dimension": dim, "offset": offset} for dim, offset in enumerate(start)]
    transform = {"input_inclusive_min": [0] * len(shape), "input_shape": list(shape), "output": output}
    return {**opened_by, "transform": transform}


def stored_dtype(dtype: np.dtype) -> np.dtype | None:
    """The dtype in which TensorStore stores an array of ``dtype``; ``None`` for a dtype that it cannot store.

    TensorStore has no uint4, for instance, and stores a uint8 in its place; no float8_e4m3, and stores a
    float32. Both have all numbers of the dtype that they stand for.
    """
    import tensorstore as ts

    def is_storable(candidate: np.dtype) -> bool:
        try:
            ts.dtype(candidate.name)
        except ValueError:
            return False
        return np.can_cast(dtype, candidate)

    return next(filter(is_storable, (dtype, *map(np.dtype, ("uint8", "int8", "float32")))), None)


def copied_out(array: jax.Array) -> tuple[HostShard, ...]:
    """The shards of an array on this process, in host memory; one copy of replicated shards.

    The array may be donated afterwards: JAX copies an array on a CPU of which numpy has a view.
    """
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    for shard in shards:
        shard.data.copy_to_host_async()
    return tuple(HostShard(shard.index, np.asarray(shard.data)) for shard in shards)


def write(copies: Mapping[Handle, Sequence[HostShard]], specs: Sequence[tuple[Handle, JsonSpec]]) -> int:
    """Writes shards of arrays, commits them in one transaction at the end, and returns the number of bytes.

    Args:
      specs: where each array goes; an array may go to several places, or to none.

    Raises: the errors of TensorStore, ``ValueError`` for most faults of the storage.
    """
    import tensorstore as ts

    context, transaction = ts.Context(_CONTEXT), ts.Transaction(atomic=True)
    writable = [(spec, copies[handle]) for handle, spec in specs if copies[handle]]
    opening = [
        ts.open(ts.Spec(spec), create=True, open=True, context=context, transaction=transaction)
        for spec, _ in writable
    ]
    writing = []
    for opened, (_, shards) in zip(opening, writable, strict=True):
        array = opened.result()
        for region, data in shards:
            _check_chunks(array, region)
            stored = data.astype(array.dtype.numpy_dtype, copy=False)
            writing.append(array[region].write(stored, can_reference_source_data_indefinitely=True))
    for written in writing:
        written.copy.result()
    transaction.commit_async().result()
    return sum(data.nbytes for _, shards in writable for _, data in shards)


def _check_chunks(array: Any, region: Region) -> None:
    """Asserts that chunks are written whole: of one that two processes write, one share would be lost."""
    chunk = array.chunk_layout.write_chunk.shape or ()  # None of a scalar
    whole = all((interval.start or 0) % size == 0 for interval, size in zip(region, chunk, strict=True))
    assert whole, f"{region} is not made of whole chunks of {chunk}"


def read(stored: Mapping[Handle, StoredArray], submesh: jax.sharding.Mesh) -> dict[Handle, jax.Array]:
    """Reads arrays onto a submesh. Each process reads the shards of its devices, each once.

    Raises: what TensorStore raises, ``ValueError`` for most faults of the storage.
    """
    import tensorstore as ts

    context = ts.Context(_CONTEXT)
    opening = [ts.open(ts.Spec(array.opened_by), open=True, context=context) for array in stored.values()]
    reading = [
        _start_reading(opened.result(), array, submesh)
        for opened, array in zip(opening, stored.values(), strict=True)
    ]
    with jax.enable_x64(True):  # so that no value is narrowed
        return {handle: wait() for handle, wait in zip(stored, reading, strict=True)}


def _as_dtype(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Raises ``ValueError`` for a number of Python, stored in the widest dtype, that does not fit."""
    with np.errstate(over="ignore"):
        converted = values.astype(dtype, copy=False)
    if not values.shape and values.dtype.name in ("int64", "float64"):
        same = (
            converted == values if values.dtype.kind == "i" else np.isfinite(converted) == np.isfinite(values)
        )
        if not same:
            raise ValueError(f"the stored number {values} does not fit into {dtype}")
    return converted


def _start_reading(opened: Any, stored: StoredArray, submesh: jax.sharding.Mesh) -> Callable[[], jax.Array]:
    """Reads the regions of an array that this process's devices are to hold, each once.

    Returns: the function that waits for the regions, and makes the array.
    """
    shape = tuple(opened.shape)
    sharding = to_sharding(fitting(stored.spec, shape, submesh.shape), submesh)
    regions = sharding.addressable_devices_indices_map(shape).values()
    # By their texts: slices are no keys before Python 3.12.
    reads = {text: opened[region].read() for text, region in {str(each): each for each in regions}.items()}

    def data_of(region: Region | None) -> np.ndarray:
        return _as_dtype(np.asarray(reads[str(region)].result()), stored.dtype)

    return functools.partial(jax.make_array_from_callback, shape, sharding, data_of)
