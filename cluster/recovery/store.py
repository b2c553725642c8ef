"""Copies of a process's values in host memory: its own, and copies that it keeps for another process."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from cluster.protocol.digests import digest_of
from cluster.recovery.journal import BEGINNING
from mpmd.ir.plan import Spec
from mpmd.ir.reshard import Box, box_of
from mpmd.runtime.digests import bytes_of
from mpmd.runtime.lost_values import LostValue
from mpmd.runtime.requests import Handle, Released, Request
from mpmd.sharding import spec_of, to_sharding

_CHUNK_BYTES = 128 * 2**20
"""Values travel together up to this size, so that Ray's object store never has to hold all of a snapshot."""

Allocate = Callable[[int], np.ndarray]
"""Returns an array of the given number of bytes, with any content."""


@dataclasses.dataclass(frozen=True)
class Snapshot(Request[None]):
    """Asks each process of a group to copy the values that live there between two steps.

    Attributes:
      number: number of the snapshot.
      base: number of the committed snapshot; older snapshots are dropped.
      released: the values and programs that the processes drop before they copy.
    """

    number: int
    base: int
    released: Released


class DamagedCopyError(RuntimeError):
    """The bytes of a copy differ from the bytes of the copied value."""


class SavedValue(NamedTuple):
    """A process's copy of a value: its type, and the bytes of each shard that the process's devices hold.

    ``digests`` are the digests of the shards when the value was copied.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: Spec
    shards: tuple[tuple[Box, np.ndarray], ...]
    digests: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for _, shard in self.shards)

    def copied(self, allocate: Allocate) -> SavedValue:
        return self._replace(shards=tuple((box, _filled(allocate, shard)) for box, shard in self.shards))


Saved = SavedValue | LostValue


def save(array: jax.Array, submesh: jax.sharding.Mesh, allocate: Allocate) -> SavedValue:
    """Copies what this process has of an array to host memory; of equal shards, one."""
    shards = {box_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    data = {box: bytes_of(np.asarray(shard)) for box, shard in shards.items()}
    return SavedValue(
        shape=array.shape,
        dtype=array.dtype,
        spec=spec_of(array.sharding, submesh, array.ndim),
        shards=tuple((box, _filled(allocate, shard)) for box, shard in data.items()),
        digests=tuple(digest_of(shard.data) for shard in data.values()),
    )


def restore(saved: SavedValue, submesh: jax.sharding.Mesh) -> jax.Array:
    """Puts a saved value on this process's devices. The array shares no memory with ``saved``."""
    sharding = to_sharding(saved.spec, submesh)
    data_of = {
        box: data.view(saved.dtype).reshape([stop - start for start, stop in box])
        for box, data in saved.shards
    }
    shards = [
        # A copy for each device: device_put may alias it, whatever may_alias says of arrays of numpy's.
        jax.device_put(data_of[box_of(index or (), saved.shape)].copy(), device)
        for device, index in sharding.addressable_devices_indices_map(saved.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(saved.shape, sharding, shards)


class Chunk(NamedTuple):
    """Some of the values that a snapshot has and its base has not; with the last, the handles of all."""

    values: Mapping[Handle, Saved]
    handles: frozenset[Handle] | None


class SnapshotStore:
    """Snapshots of the values of one process. The value of a handle never changes, so it is copied once.

    Memory is used again when the snapshots that needed it are dropped. Only one thread may change a store.
    """

    def __init__(self) -> None:
        self._values: dict[Handle, Saved] = {}
        self._snapshots: dict[int, frozenset[Handle]] = {}
        self._free: dict[int, list[np.ndarray]] = collections.defaultdict(list)

    def take(
        self, number: int, values: Mapping[Handle, jax.Array | LostValue], submesh: jax.sharding.Mesh
    ) -> None:
        """Makes a snapshot: copies the values that the store does not have."""
        fresh = values.keys() - self._values.keys()
        try:
            for handle in fresh:
                value = values[handle]
                self._values[handle] = (
                    value if isinstance(value, LostValue) else save(value, submesh, self._allocate)
                )
        except MemoryError:
            for handle in fresh:
                self._values.pop(handle, None)
            self._free.clear()  # others on this host need the memory
            raise
        self._finish(number, frozenset(values))

    def chunks(self, number: int, base: int) -> list[Chunk]:
        """The values that a snapshot has and an earlier one has not, in pieces that travel one by one."""
        handles = self._snapshots[number]
        fresh = sorted(handles - self._handles(base))
        pieces: list[dict[Handle, Saved]] = [{}]
        nbytes = 0
        for handle in fresh:
            value = self._values[handle]
            size = 0 if isinstance(value, LostValue) else value.nbytes
            if nbytes + size > _CHUNK_BYTES and pieces[-1]:
                pieces.append({})
                nbytes = 0
            pieces[-1][handle] = value
            nbytes += size
        last = len(pieces) - 1
        return [Chunk(piece, handles if i == last else None) for i, piece in enumerate(pieces)]

    def add(self, number: int, chunk: Chunk) -> None:
        """Takes in what another process has made ``chunks`` of: copies it, as it is in memory of Ray's.

        Raises: ``DamagedCopyError`` when a value is not as it was made.
        """
        for handle, value in chunk.values.items():
            if handle in self._values:
                continue
            saved = value if isinstance(value, LostValue) else value.copied(self._allocate)
            if not _is_intact(saved):
                raise DamagedCopyError(f"value {handle} arrived with other bytes than were copied")
            self._values[handle] = saved
        if chunk.handles is not None:
            self._finish(number, chunk.handles)

    def _finish(self, number: int, handles: frozenset[Handle]) -> None:
        missing = handles - self._values.keys()
        assert not missing, f"snapshot {number} lacks the values {sorted(missing)}"
        self._snapshots[number] = handles
        self._free.clear()  # what was not needed this time is of sizes that are no longer in use

    def keep_only(self, number: int) -> None:
        """Drops all snapshots except ``number``, also incomplete ones."""
        kept = self._handles(number)
        self._snapshots = {number: kept}
        for handle in self._values.keys() - kept:
            value = self._values.pop(handle)
            if not isinstance(value, LostValue):
                for _, shard in value.shards:
                    self._free[shard.nbytes].append(shard)

    def values(self, number: int) -> dict[Handle, Saved]:
        return {handle: self._values[handle] for handle in self._handles(number)}

    def damaged(self, number: int) -> list[Handle]:
        return sorted(handle for handle, saved in self.values(number).items() if not _is_intact(saved))

    def _handles(self, number: int) -> frozenset[Handle]:
        return frozenset() if number == BEGINNING else self._snapshots[number]

    def _allocate(self, nbytes: int) -> np.ndarray:
        free = self._free.get(nbytes)
        return free.pop() if free else np.empty(nbytes, np.uint8)


def _is_intact(saved: Saved) -> bool:
    return isinstance(saved, LostValue) or saved.digests == tuple(
        digest_of(shard.data) for _, shard in saved.shards
    )


def _filled(allocate: Allocate, data: np.ndarray) -> np.ndarray:
    buffer = allocate(data.nbytes)
    np.copyto(buffer, data)
    return buffer
