"""Which of the caller's arrays the groups already have."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax

from mpmd.runtime.worker import Handle


class Key(NamedTuple):
    """An array, by its ``id``, and the groups it was sent to."""

    array_id: int
    mpmd_idxs: tuple[int, ...]


class SentArrays:
    """Remembers the arrays that were sent to groups, as long as the caller has them: they cannot change.

    So frozen weights that are passed to every step travel once. When the caller drops an array, so do the
    groups. Safe to use from any thread.

    Args:
      free: drops the value under a handle on groups.
    """

    def __init__(self, free: Callable[[tuple[int, ...], Handle], None]):
        self._free = free
        self._lock = threading.RLock()  # an array may die, and call back, within any of the methods
        self._sent: dict[Key, tuple[weakref.ref[jax.Array], Handle]] = {}

    def handle(self, array: jax.Array, mpmd_idxs: tuple[int, ...]) -> Handle | None:
        """What these groups know the array by, if it was sent to them."""
        with self._lock:
            _, handle = self._sent.get(Key(id(array), mpmd_idxs), (None, None))
            return handle

    def note(self, array: jax.Array, mpmd_idxs: tuple[int, ...], handle: Handle) -> Key:
        """The array is being sent, and nobody else frees it on these groups."""
        key = Key(id(array), mpmd_idxs)
        with self._lock:
            self._sent[key] = weakref.ref(array, functools.partial(self._died, key)), handle
        return key

    def forget(self, keys: Collection[Key]) -> None:
        """Drops arrays on the groups; the next time, they are sent again."""
        with self._lock:
            for key in keys:
                _, handle = self._sent.pop(key, (None, None))
                if handle is not None:
                    self._free(key.mpmd_idxs, handle)

    def _died(self, key: Key, array: weakref.ref[jax.Array]) -> None:
        with self._lock:
            if key in self._sent and self._sent[key][0] is array:  # else the number is another array's by now
                self.forget([key])
