"""Requests to groups that can be repeated after a death.

A request is logged in a ``Journal``, and then sent by the groups' ``RayRuntime``. The caller gets a future of
this module's own, which outlives the groups' processes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from cluster.driver.calls.joined import failed
from cluster.driver.calls.pending_calls import copy_of
from cluster.driver.runtime import LoadRequests, RayRuntime
from cluster.recovery.actions import EndRewind, Rewound
from cluster.recovery.events import Answered, Copying, Event, RewindAsked, Sent, Unneeded
from cluster.recovery.journal import Outcome
from cluster.recovery.logged import Asked, LoggedSnapshot, LoggedStep
from cluster.recovery.membership import Membership
from cluster.recovery.processes import Processes
from cluster.recovery.store import Snapshot
from mpmd.errors import GroupDiedError, StateLostError
from mpmd.runtime.argument_cache import ArgumentCache
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.protocol import ReleaseQueue
from mpmd.runtime.requests import (
    NOTHING_RELEASED,
    Capture,
    CopyOut,
    Handle,
    Release,
    Released,
    Request,
    StepRequest,
    Write,
)


class Ledger:
    """The requests to groups, and their futures.

    Args:
      membership: knows which groups can be asked, and has the journal.
      groups: sends the requests; is connected later.
      processes: of the groups.
      released: handles that the user has released and groups were not told to drop yet.
      next_handle: returns numbers that ascend.
      arguments: the user's arguments that groups keep for later steps.
      takes_digests: whether groups are to digest the messages of logged steps.

    Attributes:
      changed: guards all attributes, and is notified of each change. A reply may settle a call in the thread
        that makes it, so its lock is reentrant.
      tell: tells the membership of an event, and has the resulting actions carried out.
      loads: by program number, the requests by which the groups loaded the program.
      freed: copies for storage of which the membership does not know yet that they are dropped, and ``None``
        for a look at the places. A queue, because a copy may be dropped while its thread holds any lock.
    """

    def __init__(
        self,
        membership: Membership,
        groups: RayRuntime,
        processes: Processes,
        released: ReleaseQueue,
        next_handle: Callable[[], Handle],
        arguments: ArgumentCache,
        takes_digests: bool = False,
    ):
        self.membership = membership
        self.journal = membership.journal
        self.groups = groups
        self.processes = processes
        self.changed = threading.Condition(threading.RLock())
        self.tell: Callable[[Event], object] = lambda event: None
        self.loads: dict[int, LoadRequests] = {}
        self.freed: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        self._released = released
        self._unloaded = collections.deque[int]()  # programs that the user needs no more; a replay may
        self._next_handle = next_handle
        self._arguments = arguments
        self._takes_digests = takes_digests
        self._futures: dict[tuple[Asked, int], Future] = {}
        self._writes: dict[Handle, Asked] = {}  # requests to write that are not answered, by their copies
        # By group, the first handle of the values that it may have, and why earlier ones are lost.
        self._lost_before: dict[int, tuple[Handle, RuntimeError]] = {}

    # Whether groups can be asked.

    def refusal(self, requests: Mapping[int, Request]) -> BaseException | None:
        """A new error that says why groups cannot be asked for values that requests name."""
        if self.membership.error is not None:
            return copy_of(self.membership.error)
        for mpmd_idx, (first, loss) in self._lost_before.items():
            request = requests.get(mpmd_idx)
            if request is not None and min(request.handles, default=first) < first:
                return copy_of(loss)
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

    def wait_for(self, condition: Callable[[], object], timeout: float | None = None) -> bool:
        """Waits until the condition holds, and returns whether it does. Raises why nothing works any more."""
        membership = self.membership
        with self.changed:
            holds = self.changed.wait_for(lambda: membership.error is not None or condition(), timeout)
            if membership.error is not None:
                raise copy_of(membership.error)
            return bool(holds)

    def wait_for_end_of(self, attempt: int) -> None:
        """Waits until a group has died since this attempt has begun. Raises as ``wait_for``."""
        self.wait_for(lambda: attempt != self.journal.attempt)

    def rewind(self, refused: NonFinitePolicy) -> Rewound:
        """Has groups go back and repeat their steps with nobody dead, and waits for the end.

        Returns: the first value that was refused, and the tasks that groups have kept until they are freed.
        Raises: why nothing works any more; ``StepTimeoutError`` when a repeated step took too long.
        """
        with self.changed:
            while True:
                self.wait_for(lambda: self.membership.may_go_back)
                ended: Future[EndRewind] = Future()
                self.tell(RewindAsked(ended, refused))
                try:
                    self.wait_for(ended.done)
                except BaseException:
                    if not ended.cancel():  # it has ended, and this caller does not look at it
                        self._drop_kept(ended.result().rewound)
                    raise
                ending = ended.result()
                if not ending.is_interrupted:
                    return ending.rewound
                self._drop_kept(ending.rewound)
                if ending.rewound.late is not None:
                    raise copy_of(ending.rewound.late)

    def end_rewind(self, ending: EndRewind) -> None:
        """Hands the end of a rewind to its caller; if the caller is gone, has groups drop the kept tasks."""
        if ending.ended is not None and ending.ended.set_running_or_notify_cancel():
            # Without the future, which would be kept alive by its own result.
            ending.ended.set_result(dataclasses.replace(ending, ended=None))
        else:
            self._drop_kept(ending.rewound)

    def _drop_kept(self, rewound: Rewound) -> None:
        for kept in (each.captured for each in rewound.kept):
            self.give_back({kept.mpmd_idx: Released((kept.capture.handle,))})

    def count_waiting(self) -> Mapping[int, int]:
        """The number of each group's answers that are awaited."""
        return collections.Counter(mpmd_idx for _, mpmd_idx in list(self._futures))

    # What the user has released.

    def unload(self, number: int) -> None:
        """The user needs a program no more. May be called at any point of any thread."""
        self._unloaded.append(number)

    def unload_unused(self) -> None:
        """Has groups drop, with their next request, the programs that neither user nor replay needs."""
        needed = self.journal.programs if self._unloaded else set[int]()
        for _ in range(len(self._unloaded)):
            number = self._unloaded.popleft()
            if number in needed:
                self._unloaded.append(number)
                continue
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
            self._released.add(mpmd_idx, each)

    # What groups are asked, for the first time or again.

    def ask_once(
        self, requests: Mapping[int, Request], released: Mapping[int, Released] | None = None
    ) -> dict[int, Future]:
        """Sends requests that are not logged: groups are not asked again after a death."""
        asked = Asked(requests, released or {}, is_logged=False)
        self.tell(Sent(asked))
        return self.ask_first(asked)

    def ask_first(self, request: Asked) -> dict[int, Future]:
        """Sends requests for the first time. Returns the user's future of each group's answer."""
        futures = {mpmd_idx: self._new_future(request, mpmd_idx) for mpmd_idx in request.requests}
        try:
            self.ask(request)
        except BaseException as interrupt:  # perhaps not all groups were asked, and nobody gets their replies
            unsent = RuntimeError(f"the request was not sent to all groups: {interrupt!r}")
            for mpmd_idx in request.requests:
                self.tell(Answered(self.journal.attempt, Outcome(request, mpmd_idx, error=unsent)))
            raise
        return futures

    def _new_future(self, request: Asked, mpmd_idx: int) -> Future:
        future = self._futures[request, mpmd_idx] = Future()
        future.set_running_or_notify_cancel()
        return future

    def ask(self, request: Asked) -> None:
        """Asks groups, for the first time or again.

        While groups do not run, nothing that is logged is asked: it is asked when they run again.
        """
        if request.is_logged and not self.membership.is_running:
            return
        attempt = self.journal.attempt
        for mpmd_idx, reply in self._replies(request).items():
            reply.add_done_callback(functools.partial(self._note_reply, attempt, request, mpmd_idx))

    def repeat(
        self, entries: Sequence[Asked], refused: NonFinitePolicy | None
    ) -> dict[tuple[Asked, int], Future]:
        """Asks groups once more, for a rewind. ``refused``: as of a ``StepRequest``."""
        with self.changed:
            return {
                (request, mpmd_idx): reply
                for request in entries
                for mpmd_idx, reply in self._replies(request, refused).items()
            }

    def _replies(self, asked: Asked, refused: NonFinitePolicy | None = None) -> Mapping[int, Future]:
        for mpmd_idx, released in asked.released.items():
            self.groups.release(mpmd_idx, released)
        requests = asked.requests
        if isinstance(asked, LoggedStep) and (self._takes_digests or asked.failure or refused):
            requests = {i: self._in_this_run(step, asked.failure, refused) for i, step in asked.steps.items()}
        return self.groups.ask(requests)

    def _in_this_run(
        self, step: StepRequest, failure: str | None, refused: NonFinitePolicy | None
    ) -> StepRequest:
        """The request for a step that has failed before, or whose task is kept if it makes refused values."""
        return dataclasses.replace(
            step,
            digests=self._takes_digests,
            failed=failure,
            refused=refused or step.refused,
            capture=Capture(None, self._next_handle()) if refused else step.capture,
        )

    def _note_reply(self, attempt: int, request: Asked, mpmd_idx: int, reply: Future) -> None:
        error = reply.exception()
        result = reply.result() if error is None else None
        self.tell(Answered(attempt, Outcome(request, mpmd_idx, result, error)))
        if isinstance(copying := request.requests[mpmd_idx], CopyOut):
            self._ask_write(copying.copy)

    # Copies that groups write to storage, whatever dies meanwhile.

    def write(self, mpmd_idx: int, request: Write) -> Future[list[int]]:
        """Has a group write a copy. A death of the group ends it only if the copy cannot be made again."""
        dead = self.membership.dead
        if dead and self.journal.find_copy(request.copy) is None:
            return failed(copy_of(next(iter(dead.values()))))
        writing = self._writes[request.copy] = Asked({mpmd_idx: request}, is_logged=False)
        future = self._new_future(writing, mpmd_idx)
        self._ask_write(request.copy)
        return future

    def _ask_write(self, copy: Handle) -> None:
        """Has a group write a copy, if the user has asked for the write and the group has made the copy."""
        with self.changed:
            writing, copying = self._writes.get(copy), self.journal.find_copy(copy)
            is_copied = copying is None or not copying.waiting
            if writing is None or self.membership.dead or not is_copied:
                return
            for mpmd_idx, written in self.groups.ask(writing.requests).items():
                note = functools.partial(self._note_written, self.journal.attempt, copy, mpmd_idx)
                written.add_done_callback(note)

    def _note_written(self, attempt: int, copy: Handle, mpmd_idx: int, written: Future[list[int]]) -> None:
        with self.changed:
            error = written.exception()
            counts = error is None or (  # what is written stays written, whichever attempt has asked for it
                attempt == self.journal.attempt and not isinstance(error, GroupDiedError)
            )
            if copy not in self._writes or (not counts and self.journal.find_copy(copy) is not None):
                return  # in the second case the copy is made again, and then written
            result = written.result() if error is None else None
            self.settle([Outcome(self._writes.pop(copy), mpmd_idx, result, error)])
            self.tell(Unneeded(frozenset([copy])))

    # Snapshots.

    def begin_snapshot(self) -> None:
        """Has groups copy their values, after all requests that were sent before.

        Groups that recovery leaves out, and that nothing may be asked of for long, drop what was released.
        """
        for mpmd_idx, released in self.take_released(self.membership.left_out.groups).items():
            if released != NOTHING_RELEASED:
                self.ask_once({mpmd_idx: Release(released)})
        snapshot = self.journal.begin_snapshot(self.take_released(self.membership.logged))
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
        asked = {
            mpmd_idx: Snapshot(snapshot.number, self.journal.committed, released)
            for mpmd_idx, released in snapshot.released.items()
        }
        copied = list(self.groups.ask(asked).values())
        if not any(future.done() and isinstance(future.exception(), GroupDiedError) for future in copied):
            self.tell(Copying(snapshot, copied))  # otherwise all is asked again

    # What the user is told.

    def settle(self, outcomes: Iterable[Outcome]) -> None:
        for request, mpmd_idx, result, error in outcomes:
            future = self._futures.pop((request, mpmd_idx))
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(copy_of(error) if isinstance(error, StateLostError) else error)

    def lose_values(self, losses: Mapping[int, RuntimeError]) -> None:
        """Groups have lost their values. Requests for these fail; later values are not affected."""
        first = self._next_handle()
        self._lost_before |= {mpmd_idx: (first, loss) for mpmd_idx, loss in losses.items()}
        self._arguments.forget_before(first, losses)
        for copy, writing in list(self._writes.items()):
            (mpmd_idx,) = writing.requests
            if mpmd_idx in losses:
                self.settle([Outcome(self._writes.pop(copy), mpmd_idx, None, losses[mpmd_idx])])

    def end(self, error: RuntimeError) -> None:
        self.processes.stop.set()
        self._writes.clear()
        futures, self._futures = self._futures, {}
        for future in futures.values():
            future.set_exception(copy_of(error))
