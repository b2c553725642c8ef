"""Which of the caller's arrays the groups already have."""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

from mpmd.runtime.worker import Handle


class Key(NamedTuple):
    """An array, by its ``id``, and the groups it was sent to."""

    array_id: int
    mpmd_idxs: tuple[int, ...]


class _Sent(NamedTuple):
    array: weakref.ref[jax.Array]
    handle: Handle


class SentArrays:
    """Remembers the arrays that were sent to groups, as long as the caller has them: they cannot change.

    So frozen weights that are passed to every step travel once. When the caller drops an array, so do the
    groups, with the next step. ``handle`` and ``note`` want ``with`` around them and around the submission of
    what was noted, so that no other thread's step reads an array before the step that brings it.

    Args:
      free: drops the value under a handle on groups.
    """

    def __init__(self, free: Callable[[tuple[int, ...], Handle], None]):
        self._free = free
        self._submitting = threading.Lock()
        self._sent: dict[Key, _Sent] = {}
        # Arrays die in garbage collection, at any point of any thread: nothing may wait there.
        self._given_up: collections.deque[tuple[Key, _Sent]] = collections.deque()

    def __enter__(self) -> SentArrays:
        self._submitting.acquire()
        for _ in range(len(self._given_up)):
            key, sent = self._given_up.popleft()
            if key in self._sent and self._sent[key].array is sent.array:  # not another array's by now
                del self._sent[key]
                self._free(key.mpmd_idxs, sent.handle)
        return self

    def __exit__(self, *exception: object) -> None:
        self._submitting.release()

    def handle(self, array: jax.Array, mpmd_idxs: tuple[int, ...]) -> Handle | None:
        """What these groups know the array by, if it was sent to them."""
        sent = self._sent.get(Key(id(array), mpmd_idxs))
        return sent.handle if sent and sent.array() is array else None

    def note(self, array: jax.Array, mpmd_idxs: tuple[int, ...], handle: Handle) -> Key:
        """The array is being sent, and nobody else frees it on these groups."""
        key = Key(id(array), mpmd_idxs)
        if key in self._sent:  # of an array that has died since, or was given up
            self._free(mpmd_idxs, self._sent[key].handle)
        self._sent[key] = _Sent(weakref.ref(array, functools.partial(self._died, key, handle)), handle)
        return key

    def forget(self, keys: Iterable[Key]) -> None:
        """The arrays are to be sent again. To be called from any thread."""
        for key in keys:
            if sent := self._sent.get(key):
                self._given_up.append((key, sent))

    def _died(self, key: Key, handle: Handle, array: weakref.ref[jax.Array]) -> None:
        self._given_up.append((key, _Sent(array, handle)))
