"""Requests to groups that can be repeated after a death.

A request is logged in a ``Journal``, and then sent by the groups' ``RayRuntime``. The caller gets a future of
this module's own, which outlives the groups' processes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future

from cluster.driver.calls.pending_calls import copy_of
from cluster.driver.runtime import LoadRequests, RayRuntime
from cluster.recovery.actions import EndRewind
from cluster.recovery.events import Answered, Copying, Event, RewindAsked, Unneeded
from cluster.recovery.journal import Outcome
from cluster.recovery.left_out import lost_values
from cluster.recovery.logged import (
    LoggedCopy,
    LoggedFetch,
    LoggedRead,
    LoggedRequest,
    LoggedSnapshot,
    LoggedStep,
)
from cluster.recovery.membership import Membership
from cluster.recovery.process_pool import ProcessPool
from mpmd.errors import StateLostError
from mpmd.runtime.argument_cache import ArgumentCache
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.protocol import ReleaseQueue
from mpmd.runtime.requests import Capture, Handle, Released


class Requests:
    """The requests to groups, and their futures.

    Args:
      membership: knows which groups can be asked, and has the journal.
      groups: sends the requests; is connected later.
      pool: the processes of the groups.
      released: handles that the user has released and groups were not told to drop yet.
      next_handle: returns numbers that ascend.
      arguments: the user's arguments that groups keep for later steps.

    Attributes:
      changed: guards all attributes, and is notified of each change. A reply may settle a call in the thread
        that makes it, so its lock is reentrant.
      tell: tells the membership of an event, and has the resulting actions carried out.
      loads: by program number, the requests by which the groups loaded the program.
      unlogged: futures of requests that are not in the journal; they fail when values are lost.
      rewinds: by number, the rewinds that a caller waits for, and their ends.
    """

    def __init__(
        self,
        membership: Membership,
        groups: RayRuntime,
        pool: ProcessPool,
        released: ReleaseQueue,
        next_handle: Callable[[], Handle],
        arguments: ArgumentCache,
    ):
        self.membership = membership
        self.journal = membership.journal
        self.groups = groups
        self.pool = pool
        self.num_groups = len(groups.processes_per_group)
        self.changed = threading.Condition(threading.RLock())
        self.tell: Callable[[Event], object] = lambda event: None
        self.loads: dict[int, LoadRequests] = {}
        self.unlogged: set[Future] = set()
        self.rewinds: dict[int, EndRewind | None] = {}
        self._released = released
        self._unloaded = collections.deque[int]()  # programs of which the journal does not know it yet
        self._next_handle = next_handle
        self._arguments = arguments
        self._futures: dict[tuple[LoggedRequest, int], Future] = {}
        self._loss: StateLostError | None = None  # why there are no values with handles before the first one
        self._first_handle: Handle = 0
        self._begun_anew: dict[int, Handle] = {}  # groups that are left out, and their first value since

    # Whether groups can be asked.

    def refusal(self, handles: Mapping[int, Collection[Handle]]) -> BaseException | None:
        """A new error that says why groups cannot be asked for what these handles name."""
        if self.membership.error is not None:
            return copy_of(self.membership.error)
        oldest = {i: min(of_group, default=self._first_handle) for i, of_group in handles.items()}
        logged = [oldest[mpmd_idx] for mpmd_idx in self.logged & oldest.keys()]
        if self._loss is not None and min(logged, default=self._first_handle) < self._first_handle:
            return copy_of(self._loss)
        for mpmd_idx, first in self._begun_anew.items():
            if oldest.get(mpmd_idx, first) < first:
                return lost_values(mpmd_idx)
        return None

    def wait_until_running(self) -> None:
        """Waits until no group is being replaced or about to move, or nothing works any more."""
        membership = self.membership
        self.changed.wait_for(lambda: membership.error is not None or membership.is_running)

    def wait_to_submit(self) -> None:
        """As ``wait_until_running``, and until the snapshot under way is in time."""
        self.changed.wait_for(self._may_submit)

    def _may_submit(self) -> bool:
        membership = self.membership
        if membership.error is not None or not membership.is_running:
            return membership.error is not None
        if membership.snapshot_is_late and self.journal.keeps_copies:
            self.tell(Unneeded())  # what is being saved does not keep a step waiting
        return membership.is_running and not membership.snapshot_is_late

    def wait_for_end_of(self, attempt: int) -> None:
        """Waits until a group has died since this attempt has begun, or nothing works any more."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.membership.error is not None or attempt != self.journal.attempt
            )

    def rewind(self, refused: NonFinitePolicy) -> EndRewind:
        """Has groups go back and repeat their steps with nobody dead, and waits for the end.

        Returns: the first value that was refused, and the tasks that groups have kept until they are freed.
        Raises: why nothing works any more; ``StepTimeoutError`` when a repeated step took too long.
        """
        membership = self.membership
        with self.changed:
            while True:
                self.changed.wait_for(lambda: membership.error is not None or membership.may_go_back)
                if membership.error is not None:
                    raise copy_of(membership.error)
                number = self._next_handle()
                self.rewinds[number] = None
                self.tell(RewindAsked(number, refused))
                try:
                    self.changed.wait_for(functools.partial(self._has_ended, number))
                finally:
                    ending = self.rewinds.pop(number)
                if ending is None:
                    continue
                if not ending.is_interrupted:
                    return ending
                self._drop_kept(ending)
                if ending.late is not None:
                    raise copy_of(ending.late)

    def end_rewind(self, ending: EndRewind) -> None:
        """Hands the end of a rewind to its caller; if the caller is gone, has groups drop the kept tasks."""
        if ending.number is not None and ending.number in self.rewinds:
            self.rewinds[ending.number] = ending
        else:
            self._drop_kept(ending)

    def _drop_kept(self, ending: EndRewind) -> None:
        for kept in (each.captured for each in ending.kept):
            handles = tuple(handle for handle in kept.handles if handle is not None)
            self.give_back({kept.mpmd_idx: Released(handles)})

    def _has_ended(self, number: int) -> bool:
        return self.rewinds[number] is not None or self.membership.error is not None

    def count_waiting(self) -> Mapping[int, int]:
        """The number of each group's answers that are awaited."""
        return collections.Counter(mpmd_idx for _, mpmd_idx in list(self._futures))

    # What the user has released.

    def unload(self, number: int) -> None:
        """The user needs a program no more. May be called at any point of any thread."""
        self._unloaded.append(number)

    def unload_unused(self) -> None:
        """Has groups drop, with their next request, the programs that neither user nor replay needs."""
        while self._unloaded:
            self.journal.release_programs([self._unloaded.popleft()])
        for number in self.journal.take_unused_programs():
            self.loads.pop(number, None)
            self.groups.unload(number)

    def take_released(self, groups: Iterable[int]) -> dict[int, Released]:
        """The values that groups are to drop with a request; a copy among them need not be made again."""
        released = {i: self._released.take(i) for i in groups}
        if self.journal.keeps_copies:
            freed = {handle for each in released.values() for handle in each.handles}
            self.tell(Unneeded(frozenset(freed)))
        return released

    def give_back(self, released: Mapping[int, Released]) -> None:
        """Queues handles for release again, since groups were not told to drop them."""
        for mpmd_idx, each in released.items():
            for handle in each.handles:
                self._released.add_handle((mpmd_idx,), handle)

    # What groups are asked, for the first time or again.

    def ask_first(
        self, request: LoggedRequest, then: Callable[[], object] = lambda: None
    ) -> dict[int, Future]:
        """Sends a request that was just logged. Returns the user's future of each group's answer.

        ``then`` is as of ``ask``.
        """
        futures = {}
        for mpmd_idx in request.groups:
            futures[mpmd_idx] = self._futures[request, mpmd_idx] = Future()
            futures[mpmd_idx].set_running_or_notify_cancel()
        try:
            self.ask(request, then)
        except BaseException as interrupt:  # perhaps not all groups were asked, and nobody gets their replies
            unsent = RuntimeError(f"the request was not sent to all groups: {interrupt!r}")
            for mpmd_idx in request.groups:
                self.tell(Answered(self.journal.attempt, request, mpmd_idx, error=unsent))
            raise
        return futures

    def ask(self, request: LoggedRequest, then: Callable[[], object] = lambda: None) -> None:
        """Asks the groups of a request that is logged.

        While groups do not run, nothing is asked: all that is logged is asked when they run again.
        ``then`` is called, in any thread, when the journal knows of a reply.
        """
        if not self.membership.is_running:
            return
        attempt = self.journal.attempt
        for mpmd_idx, reply in self._replies(request).items():
            reply.add_done_callback(functools.partial(self._note_reply, attempt, request, mpmd_idx))
            reply.add_done_callback(lambda _: then())

    def repeat(
        self, entries: Sequence[LoggedStep | LoggedRead], refused: NonFinitePolicy | None
    ) -> dict[tuple[LoggedStep | LoggedRead, int], Future]:
        """Asks groups once more, for a rewind. ``refused``: as of a ``StepRequest``."""
        with self.changed:
            return {
                (request, mpmd_idx): reply
                for request in entries
                for mpmd_idx, reply in self._replies(request, refused).items()
            }

    def _replies(
        self,
        request: LoggedRequest,
        refused: NonFinitePolicy | None = None,
    ) -> Mapping[int, Future]:
        match request:
            case LoggedStep():
                return self.groups.submit_step(
                    {
                        i: dataclasses.replace(
                            asked,
                            failed=request.failure,
                            refused=refused or asked.refused,
                            capture=Capture(None, self._next_handle()) if refused else asked.capture,
                        )
                        for i, asked in request.requests.items()
                    }
                )
            case LoggedFetch(mpmd_idx, handle):
                return {mpmd_idx: self.groups.fetch(mpmd_idx, handle)}
            case LoggedRead(mpmd_idx, stored):
                return {mpmd_idx: self.groups.read(mpmd_idx, stored)}
            case LoggedCopy(mpmd_idx, copy, handles):
                return {mpmd_idx: self.groups.copy_out(mpmd_idx, copy, handles)}
        raise AssertionError(f"{request} is no request that groups know")

    @property
    def logged(self) -> frozenset[int]:
        """The groups that are not left out."""
        return frozenset(range(self.num_groups)) - self.membership.left_out.groups

    def _note_reply(self, attempt: int, request: LoggedRequest, mpmd_idx: int, reply: Future) -> None:
        error = reply.exception()
        result = reply.result() if error is None else None
        self.tell(Answered(attempt, request, mpmd_idx, result, error))

    def begin_snapshot(self) -> None:
        """Has groups copy their values, after all requests that were sent before."""
        snapshot = self.journal.begin_snapshot(self.take_released(self.logged))
        try:
            self.ask_for_copies(snapshot)
        except BaseException:  # an interrupt: perhaps nobody waits for the copies
            self.journal.abandon(snapshot)
            self.give_back(snapshot.released)
            raise

    def ask_for_copies(self, snapshot: LoggedSnapshot) -> None:
        """Asks groups for the copies of a snapshot, for the first time or again. As ``ask``."""
        if self.membership.dead:
            return
        copied: list[Future] = []
        try:
            for mpmd_idx, released in snapshot.released.items():
                numbers = (snapshot.number, self.journal.committed)
                copied += self.groups.call_group(mpmd_idx, "snapshot", *numbers, released)
        except RuntimeError:
            return  # a group has died, and all is asked again; or the mesh was closed
        self.tell(Copying(snapshot, copied))

    # What the user is told.

    def settle(self, outcomes: Iterable[Outcome]) -> None:
        """Settles the futures of requests."""
        for request, mpmd_idx, result, error in outcomes:
            future = self._futures.pop((request, mpmd_idx))
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(copy_of(error) if isinstance(error, StateLostError) else error)

    def lose_values(self, loss: StateLostError) -> None:
        """No group has a value any more. Requests for values from before fail; later values are not affected.

        Groups that recovery leaves out keep their values.
        """
        self._loss = loss
        self._first_handle = self._next_handle()
        self._arguments.forget_before(self._first_handle, self.logged)
        self._fail_unlogged(loss)

    def forget_values(self, groups: Collection[int]) -> None:
        """These groups, which recovery leaves out, were restarted, and have no value from before."""
        first = self._next_handle()
        self._begun_anew |= dict.fromkeys(groups, first)
        self._arguments.forget_before(first, groups)

    def _fail_unlogged(self, error: BaseException) -> None:
        futures, self.unlogged = self.unlogged, set()
        for future in futures:
            future.set_exception(copy_of(error))

    def end(self, error: RuntimeError) -> None:
        """Fails all that is asked."""
        self.pool.stop.set()
        self._fail_unlogged(error)
        futures, self._futures = self._futures, {}
        for future in futures.values():
            future.set_exception(copy_of(error))
