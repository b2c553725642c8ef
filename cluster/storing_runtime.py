"""A runtime that can ask groups again what they were to read from storage, and to save.

To save, a group copies values to host memory, in order with the steps, and writes the copy later. When a
group dies in between, all groups make their copies again, and what is not written is written then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from cluster.actor_calls import ActorCalls
from cluster.connection import Connection
from cluster.driver import RayRuntime
from cluster.fleet import Fleet
from cluster.joined import failed
from cluster.journaled_runtime import JournaledRuntime
from cluster.pending_calls import copy_of
from cluster.recovery import Recovery
from cluster.watchdog import Limits
from mpmd.errors import GroupDiedError
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.runtime.journal import Logged, LoggedCopy, LoggedRead
from mpmd.runtime.requests import Handle, StepReply
from mpmd.runtime.storage import JsonSpec, StoredArray


class _Write(NamedTuple):
    """What a group was asked to write, and was not heard to have written."""

    mpmd_idx: int
    specs: Sequence[Sequence[tuple[Handle, JsonSpec]]]
    future: Future[list[int]]


class StoringRuntime(JournaledRuntime):
    """Implements what ``mpmd.runtime.protocol.Runtime`` has of storage. Its arguments are its base's."""

    def __init__(
        self,
        fleet: Fleet,
        connections: Sequence[Connection],
        limits: Limits,
        runtime_of: Callable[[ActorCalls], RayRuntime],
        recovery: Recovery,
        max_in_flight: int = MAX_IN_FLIGHT,
    ):
        self._writes: dict[Handle, _Write] = {}
        self._unwritten: set[Handle] = set()  # copies that are perhaps still to be written
        super().__init__(fleet, connections, limits, runtime_of, recovery, max_in_flight)

    def read(self, mpmd_idx: int, stored: Mapping[Handle, StoredArray]) -> Future[StepReply]:
        """As in the protocol. After a death it is repeated, unless a snapshot has the values."""
        self.check_process()
        with self._changed:
            self._wait_until_running()
            if (refusal := self._refusal(stored)) is not None:
                return failed(refusal)
            read = self._journal.add_read(mpmd_idx, stored)
            future = self._future_of(read, mpmd_idx)
            with self._failing_on_interrupt(read):
                self._ask(read)
            return future

    def copy_out(self, mpmd_idx: int, copy: Handle, handles: Sequence[Handle]) -> Future[None]:
        """As in the protocol. After a death the copy is made again, as long as the log goes back to it."""
        self.check_process()
        with self._changed:
            self._wait_until_running()
            if (refusal := self._refusal([copy, *handles])) is not None:
                return failed(refusal)
            self._unwritten.add(copy)
            entry = self._journal.add_copy(mpmd_idx, copy, handles)
            future = self._future_of(entry, mpmd_idx)
            with self._failing_on_interrupt(entry):
                self._ask(entry)
            return future

    def free(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        self._unwritten.discard(handle)
        super().free(mpmd_idxs, handle)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being saved."""
        return bool(self._unwritten)

    def write(
        self, mpmd_idx: int, copy: Handle, specs: Sequence[Sequence[tuple[Handle, JsonSpec]]]
    ) -> Future[list[int]]:
        """As in the protocol. A death of the group ends it only if the copy cannot be made again."""
        self.check_process()
        with self._changed:
            if (refusal := self._refusal([copy])) is not None:
                return failed(refusal)
            if self._dead and self._journal.find_copy(copy) is None:
                return failed(copy_of(next(iter(self._dead.values()))))
            future: Future[list[int]] = Future()
            self._writes[copy] = _Write(mpmd_idx, specs, future)
            self._ask_write(copy)
            return future

    def _ask(self, entry: Logged) -> None:
        match entry:
            case LoggedRead():
                self._listen(entry, entry.mpmd_idx, self._groups.read(entry.mpmd_idx, entry.stored))
            case LoggedCopy():
                copied = self._groups.copy_out(entry.mpmd_idx, entry.copy, entry.handles)
                self._listen(entry, entry.mpmd_idx, copied)
                copied.add_done_callback(lambda _: self._ask_write(entry.copy))  # the journal has heard of it
            case _:
                super()._ask(entry)

    def _ask_write(self, copy: Handle) -> None:
        """Has a group write, if that is wanted, and the copy is there."""
        with self._changed:
            write, entry = self._writes.get(copy), self._journal.find_copy(copy)
            is_copied = entry is None or self._journal.is_answered(entry)
            if write is None or self._dead or not is_copied:
                return
            written = self._groups.write(write.mpmd_idx, copy, write.specs)
            written.add_done_callback(functools.partial(self._note_written, self._journal.attempt, copy))

    def _note_written(self, attempt: int, copy: Handle, written: Future[list[int]]) -> None:
        with self._changed:
            error = written.exception()
            counts = attempt == self._journal.attempt and not isinstance(error, GroupDiedError)
            if copy not in self._writes or (not counts and self._journal.find_copy(copy) is not None):
                return  # in the second case the copy is made again, and then written
            self._note(lambda: self._journal.drop_copies({copy}))
            future = self._writes.pop(copy).future
            if error is None:
                future.set_result(written.result())
            else:
                future.set_exception(error)

    def _lose_values(self, death: GroupDiedError, reason: str) -> None:
        super()._lose_values(death, reason)
        assert self._loss is not None, "the base has set it"
        self._fail_writes(self._loss)

    def _end(self, error: RuntimeError) -> None:
        super()._end(error)
        self._fail_writes(error)

    def _fail_writes(self, error: BaseException) -> None:
        writes, self._writes = self._writes, {}
        for write in writes.values():
            write.future.set_exception(copy_of(error))
