"""The arguments that steps send to groups, and the arguments that groups keep for later calls."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from mpmd.ir.placement import Placement
from mpmd.runtime.requests import Handle


class PlacedPiece(NamedTuple):
    """A caller's array, or layers of the array such as ``[0:2]``, and the placement that groups need."""

    array: jax.Array
    part: str
    placement: Placement

    @property
    def key(self) -> _Key:
        return id(self.array), self.part, self.placement


_Key = tuple[int, str, Placement]


class _CachedArgument(NamedTuple):
    array: weakref.ref[jax.Array]
    handle: Handle
    mpmd_idxs: tuple[int, ...]


class ArgumentCache:
    """Knows which of the caller's arrays groups hold, until the caller drops an array: JAX arrays never
    change.

    So frozen weights that are passed to every step travel once. When the caller drops an array, the groups
    drop it with the next step. An array that one program reads sharded and another replicated is held
    twice: resharding it in each step would cost more.

    Args:
      next_handle: returns a handle that was never used before.
      free: drops the value under a handle on groups, with their next request.
    """

    def __init__(
        self,
        next_handle: Callable[[], Handle],
        free: Callable[[tuple[int, ...], Handle], None],
        num_groups: int,
    ):
        self.next_handle = next_handle
        self.free = free
        self._delivering = [threading.Lock() for _ in range(num_groups)]
        self._changing = threading.Lock()
        self._entries: dict[_Key, _CachedArgument] = {}
        self._oldest: list[Handle] = [0] * num_groups
        # Arrays die in garbage collection, at any point of any thread, where no lock may be taken.
        self._invalid: collections.deque[tuple[_Key, Handle]] = collections.deque()

    @contextlib.contextmanager
    def delivery(self, mpmd_idxs: Sequence[int]) -> Iterator[Delivery]:
        """Collects the arguments of one step, which is to be submitted within the context.

        Steps of the same groups wait until it is left, so that none reads an array before the step that sends
        it. Steps of other groups do not: collecting may wait for a value.

        Args:
          mpmd_idxs: the groups that take part in the step, ascending.
        """
        with contextlib.ExitStack() as delivering:
            for mpmd_idx in mpmd_idxs:
                delivering.enter_context(self._delivering[mpmd_idx])
            if self._invalid:
                self._free_invalid(frozenset(mpmd_idxs))
            yield Delivery(self, mpmd_idxs)

    def find(self, piece: PlacedPiece) -> Handle | None:
        entry = self._entries.get(piece.key)
        if entry is None or entry.array() is not piece.array:
            return None
        is_there = all(entry.handle >= self._oldest[mpmd_idx] for mpmd_idx in entry.mpmd_idxs)
        return entry.handle if is_there else None

    def add(self, piece: PlacedPiece, handle: Handle) -> _Key:
        """From now on only the cache frees ``handle``."""
        key = piece.key
        died = functools.partial(self._died, key, handle)
        with self._changing:
            if key in self._entries:  # of an array that has died since, or an invalid one
                self.free(self._entries[key].mpmd_idxs, self._entries[key].handle)
            self._entries[key] = _CachedArgument(
                weakref.ref(piece.array, died), handle, piece.placement.mpmd_idxs
            )
        return key

    def invalidate_if_failed(self, entries: Iterable[tuple[_Key, Handle]], reply: Future[Any]) -> None:
        """Has the next step send the arrays again if the step that sent them has failed on a group.

        May be called from any thread.
        """
        if reply.exception() is not None:
            self._invalid.extend(entries)

    def forget_before(self, handle: Handle, mpmd_idxs: Iterable[int]) -> None:
        """Groups have lost the values of earlier handles. May be called from any thread."""
        for mpmd_idx in mpmd_idxs:
            self._oldest[mpmd_idx] = handle

    def _died(self, key: _Key, handle: Handle, _: weakref.ref[jax.Array]) -> None:
        self._invalid.append((key, handle))

    def _free_invalid(self, mpmd_idxs: frozenset[int]) -> None:
        """Frees the entries of dead arrays, and the invalid entries on ``mpmd_idxs`` alone, which no step
        of further groups may find."""
        with self._changing:
            for _ in range(len(self._invalid)):
                key, handle = self._invalid.popleft()
                entry = self._entries.get(key)
                if entry is None or entry.handle != handle:
                    continue  # it has been freed already
                if entry.array() is None or mpmd_idxs.issuperset(entry.mpmd_idxs):
                    del self._entries[key]
                    self.free(entry.mpmd_idxs, handle)
                else:
                    self._invalid.append((key, handle))


class Delivery:
    """The arguments that one step sends to groups.

    The cache changes with ``commit``. So a step whose arguments cannot all be collected leaves no trace.

    Attributes:
      host_arrays: for each group the values it is sent, by handle.
    """

    def __init__(self, cache: ArgumentCache, mpmd_idxs: Sequence[int]):
        self._cache = cache
        self.host_arrays: dict[int, dict[Handle, np.ndarray]] = {group: {} for group in mpmd_idxs}
        self._transient: dict[Handle, tuple[int, ...]] = {}
        self._to_cache: dict[_Key, tuple[PlacedPiece, Handle]] = {}

    def find(self, piece: PlacedPiece) -> Handle | None:
        if added := self._to_cache.get(piece.key):
            return added[1]
        return self._cache.find(piece)

    def send(self, value: np.ndarray, placement: Placement, piece: PlacedPiece | None) -> Handle:
        handle = self._cache.next_handle()
        for mpmd_idx in placement.mpmd_idxs:
            self.host_arrays[mpmd_idx][handle] = value
        if piece is None:
            self._transient[handle] = placement.mpmd_idxs
        else:
            self._to_cache[piece.key] = piece, handle
        return handle

    def transient(self, mpmd_idx: int) -> tuple[Handle, ...]:
        return tuple(handle for handle, mpmd_idxs in self._transient.items() if mpmd_idx in mpmd_idxs)

    def commit(self, replies: Iterable[Future[Any]]) -> None:
        """Caches the sent arrays, since the step was submitted. If the step fails, groups may lack these
        arrays, and the next step sends them again."""
        entries = [(self._cache.add(piece, handle), handle) for piece, handle in self._to_cache.values()]
        if entries:
            invalidate_if_failed = functools.partial(self._cache.invalidate_if_failed, entries)
            for reply in replies:
                reply.add_done_callback(invalidate_if_failed)

    def cancel(self) -> None:
        """Frees the arrays to be cached on the groups: the step may have reached some groups."""
        for piece, handle in self._to_cache.values():
            self._cache.free(piece.placement.mpmd_idxs, handle)
