"""Saves checkpoints to storage, whatever dies meanwhile; ``journal`` has the snapshots of recovery.

A group copies values to host memory, in order with the steps, and writes the copy later. When a group dies in
between, all groups copy their values again, and write the copies that are not written yet.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
from collections.abc import Sequence
from concurrent.futures import Future

from cluster.driver.calls.joined import failed
from cluster.driver.calls.pending_calls import copy_of
from cluster.recovery.events import CopyAsked, Unneeded
from cluster.recovery.logged import LoggedCopy
from cluster.recovery.requests import Requests
from mpmd.errors import GroupDiedError
from mpmd.runtime.requests import Handle
from mpmd.runtime.storage import JsonSpec


@dataclasses.dataclass(frozen=True)
class _Write:
    """A group's request to write, until the group has said that it has written."""

    mpmd_idx: int
    specs: Sequence[Sequence[tuple[Handle, JsonSpec]]]
    future: Future[list[int]]


class Saving:
    """Has groups copy values, and write the copies. Who calls, but for ``free``, holds the requests' lock.

    Attributes:
      freed: copies of which the membership does not know yet that they are dropped, and ``None`` for a look
        at the places. A queue, because garbage collection may drop a copy while its thread holds any lock.
    """

    def __init__(self, requests: Requests):
        self._requests = requests
        self._writes: dict[Handle, _Write] = {}
        self.freed: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()

    def free(self, copy: Handle) -> None:
        """Drops a copy. A handle that names none is ignored. May be called at any point of any thread."""
        if copy in self._requests.membership.moves.unwritten:
            self.freed.put(copy)

    def copy_out(self, mpmd_idx: int, copy: Handle, handles: Sequence[Handle]) -> Future[None]:
        """Has a group copy values. After a death it does so again, as long as the log goes back to it."""
        self._requests.tell(CopyAsked(copy))
        entry = self._requests.journal.add_copy(mpmd_idx, copy, handles)
        return self._requests.ask_first(entry, functools.partial(self._ask_write, copy))[mpmd_idx]

    def copy_again(self, entry: LoggedCopy) -> None:
        """Asks a group once more for a copy that is logged, and then to write it if that is wanted."""
        self._requests.ask(entry, functools.partial(self._ask_write, entry.copy))

    def write(
        self, mpmd_idx: int, copy: Handle, specs: Sequence[Sequence[tuple[Handle, JsonSpec]]]
    ) -> Future[list[int]]:
        """Has a group write a copy. A death of the group ends it only if the copy cannot be made again."""
        requests = self._requests
        dead = requests.membership.dead
        if dead and requests.journal.find_copy(copy) is None:
            return failed(copy_of(next(iter(dead.values()))))
        future: Future[list[int]] = Future()
        self._writes[copy] = _Write(mpmd_idx, specs, future)
        requests.unlogged.add(future)
        self._ask_write(copy)
        return future

    def _ask_write(self, copy: Handle) -> None:
        """Has a group write a copy, if the user has asked for the write and the group has made the copy."""
        requests = self._requests
        with requests.changed:
            write, entry = self._writes.get(copy), requests.journal.find_copy(copy)
            is_copied = entry is None or requests.journal.is_answered(entry)
            if write is None or write.future.done() or requests.membership.dead or not is_copied:
                return
            written = requests.groups.write(write.mpmd_idx, copy, write.specs)
            written.add_done_callback(functools.partial(self._note_written, requests.journal.attempt, copy))

    def _note_written(self, attempt: int, copy: Handle, written: Future[list[int]]) -> None:
        requests = self._requests
        with requests.changed:
            error = written.exception()
            counts = attempt == requests.journal.attempt and not isinstance(error, GroupDiedError)
            if copy not in self._writes or (not counts and requests.journal.find_copy(copy) is not None):
                return  # in the second case the copy is made again, and then written
            requests.tell(Unneeded(frozenset([copy])))
            future = self._writes.pop(copy).future
            if future.done():
                return  # it has failed with the values
            requests.unlogged.remove(future)
            if error is None:
                future.set_result(written.result())
            else:
                future.set_exception(error)
