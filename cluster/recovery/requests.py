"""Requests to groups that can be made again.

What is asked is logged in a ``Journal``, and asked of the groups' ``RayRuntime``. Who asks gets a future of
this module's own, which outlives the groups' processes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future

from cluster.driver.calls.pending_calls import copy_of
from cluster.driver.runtime import LoadRequests, RayRuntime
from cluster.recovery.journal import BEGINNING, Journal, Outcome, ResultChangedError
from cluster.recovery.logged import LoggedCopy, LoggedFetch, LoggedRead, LoggedRequest, LoggedStep
from cluster.recovery.policy import loss_of_values
from cluster.recovery.process_pool import ProcessPool
from mpmd.errors import GroupDiedError, RecoveryError, StateLostError
from mpmd.runtime.argument_cache import ArgumentCache
from mpmd.runtime.protocol import ReleaseQueue
from mpmd.runtime.requests import Handle, Released

FROM_DISK = "Start again from a checkpoint on disk"


class Requests:
    """The requests to groups, and their futures.

    Args:
      groups: are asked; connected later.
      pool: their processes.
      released: what the user has released and groups were not told.
      next_handle: gives numbers that ascend.
      arguments: what groups keep of the user's.

    Attributes:
      changed: guards all of this, and is notified of each change. A reply may settle a call in the thread
        that makes it, so its lock is reentrant.
      dead: the groups that are being replaced, and why.
      is_paused: nothing is asked of groups meanwhile.
      error: why nothing works any more.
      loads: what the groups were asked, so that they loaded each program.
      last_checkpoint: as of ``mpmd.runtime.protocol.Runtime``.
      on_failed_step: is called when groups are to go back because of a step.
      unlogged: futures of what is not in the journal; they fail when values are lost.
    """

    def __init__(
        self,
        groups: RayRuntime,
        pool: ProcessPool,
        released: ReleaseQueue,
        next_handle: Callable[[], Handle],
        arguments: ArgumentCache,
    ):
        self.groups = groups
        self.pool = pool
        self.num_groups = len(groups.processes_per_group)
        self.journal = Journal()
        self.changed = threading.Condition(threading.RLock())
        self.dead: dict[int, GroupDiedError] = {}
        self.is_paused = False
        self.error: RuntimeError | None = None
        self.loads: dict[int, LoadRequests] = {}
        self.last_checkpoint: str | None = None
        self.on_failed_step: Callable[[LoggedStep], object] = lambda step: None
        self.unlogged: set[Future] = set()
        self._released = released
        self._unloaded = collections.deque[int]()  # programs of which the journal does not know it yet
        self._next_handle = next_handle
        self._arguments = arguments
        self._futures: dict[tuple[LoggedRequest, int], Future] = {}
        self._loss: StateLostError | None = None  # why there are no values with handles before the first one
        self._first_handle: Handle = 0
        self._copied_snapshot = BEGINNING  # the committed one, as far as the pool knows

    # Whether groups can be asked.

    def refusal(self, handles: Collection[Handle]) -> BaseException | None:
        """A new error that says why a request with these handles cannot be made."""
        if self.error is not None:
            return copy_of(self.error)
        if self._loss is not None and min(handles, default=self._first_handle) < self._first_handle:
            return copy_of(self._loss)
        return None

    def wait_until_running(self, is_free: Callable[[], bool] = lambda: True) -> None:
        """Waits until no group is being replaced or about to move, or nothing works any more."""
        self.changed.wait_for(
            lambda: self.error is not None or (not self.dead and not self.is_paused and is_free())
        )

    def wait_for_end_of(
        self, attempt: int, unless: Callable[[], bool] = lambda: False, seconds: float | None = None
    ) -> None:
        """Waits until a group has died since this attempt has begun, or nothing works any more."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.error is not None or attempt != self.journal.attempt or unless(), seconds
            )

    def count_waiting(self) -> Mapping[int, int]:
        """The number of each group's answers that are awaited."""
        return collections.Counter(mpmd_idx for _, mpmd_idx in list(self._futures))

    # What the user has released.

    def unload(self, number: int) -> None:
        """The user needs a program no more. May be called at any point of any thread."""
        self._unloaded.append(number)

    def unload_unused(self) -> None:
        """Has groups drop, with what they are asked next, the programs that neither user nor replay needs."""
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
            self.note(lambda: self.journal.drop_copies(freed))
        return released

    def give_back(self, released: Mapping[int, Released]) -> None:
        """Groups were not told of these values."""
        for mpmd_idx, each in released.items():
            for handle in each.handles:
                self._released.add_handle((mpmd_idx,), handle)

    # What groups are asked, for the first time or again.

    def ask_first(
        self, request: LoggedRequest, then: Callable[[], object] = lambda: None
    ) -> dict[int, Future]:
        """Asks the groups of a request that was just logged. Returns futures of what the user is told.

        While groups are being replaced, nothing is asked: all that is logged is asked when they are there.
        ``then`` is as of ``ask``.
        """
        futures = {}
        for mpmd_idx in request.groups:
            futures[mpmd_idx] = self._futures[request, mpmd_idx] = Future()
            futures[mpmd_idx].set_running_or_notify_cancel()
        if not self.dead:
            with self._failing_on_interrupt(request):
                self.ask(request, then)
        return futures

    @contextlib.contextmanager
    def _failing_on_interrupt(self, request: LoggedRequest) -> Iterator[None]:
        """Fails a request that perhaps not all groups were asked, and whose replies nobody gets."""
        try:
            yield
        except BaseException as interrupt:
            unsent = RuntimeError(f"the request was not sent to all groups: {interrupt!r}")
            for mpmd_idx in request.groups:
                self.note(
                    functools.partial(self.journal.fail, self.journal.attempt, request, mpmd_idx, unsent)
                )
            raise

    def ask(self, request: LoggedRequest, then: Callable[[], object] = lambda: None) -> None:
        """Asks the groups of a request that is logged.

        ``then`` is called, in any thread, when the journal knows of a reply.
        """
        attempt = self.journal.attempt
        for mpmd_idx, reply in self._replies(request).items():
            reply.add_done_callback(functools.partial(self._note_reply, attempt, request, mpmd_idx))
            reply.add_done_callback(lambda _: then())

    def _replies(self, request: LoggedRequest) -> Mapping[int, Future]:
        match request:
            case LoggedStep():
                number = self._next_handle()  # groups refuse earlier ones
                return self.groups.submit_step(
                    {
                        i: dataclasses.replace(asked, step=number, failed=request.failure)
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

    def _note_reply(self, attempt: int, request: LoggedRequest, mpmd_idx: int, reply: Future) -> None:
        error = reply.exception()
        if isinstance(error, GroupDiedError):
            return  # the death itself is noted, and then all is asked again
        if error is None:
            self.note(lambda: self.journal.succeed(attempt, request, mpmd_idx, reply.result()))
        else:
            self.note(lambda: self.journal.fail(attempt, request, mpmd_idx, error))

    def note(self, event: Callable[[], Iterable[Outcome]]) -> None:
        """Has the journal know of something, and does what follows from it."""
        with self.changed:
            if self.error is not None:
                return
            try:
                outcomes = event()
            except ResultChangedError as changed:
                self.give_up(RecoveryError(f"{changed}. {FROM_DISK}", changed.mpmd_idx), changed.__cause__)
                return
            if self._copied_snapshot != self.journal.committed:
                self._copied_snapshot = self.journal.committed
                self.pool.copies.mark_committed()
            self.unload_unused()
            if self.journal.failed is not None and not self.dead:
                self.on_failed_step(self.journal.failed)  # before who waits for the step asks for more
            for request, mpmd_idx, result, error in outcomes:
                future = self._futures.pop((request, mpmd_idx))
                if error is None:
                    future.set_result(result)
                else:
                    is_shared = isinstance(error, StateLostError)
                    future.set_exception(copy_of(error) if is_shared else error)
            self.changed.notify_all()

    # When values are lost, or everything is.

    def lose_values(self, death: GroupDiedError, reason: str) -> None:
        """No group has a value any more. What comes from before fails; what is made anew does not."""
        self._loss = loss = loss_of_values(death, reason, self.last_checkpoint)
        self._first_handle = self._next_handle()
        self._arguments.forget_before(self._first_handle)
        self._copied_snapshot = BEGINNING
        self._fail_unlogged(loss)
        self.note(lambda: self.journal.lose_values(loss))

    def _fail_unlogged(self, error: BaseException) -> None:
        futures, self.unlogged = self.unlogged, set()
        for future in futures:
            future.set_exception(copy_of(error))

    def give_up(self, error: RuntimeError, cause: BaseException | None = None) -> None:
        """Fails all that is asked, now and later, and ends the processes."""
        error.__cause__ = cause
        self.end(error)
        # Not here: it waits for a thread that may wait for this one.
        threading.Thread(target=self.pool.release, name="mpmd end", daemon=True).start()

    def end(self, error: RuntimeError) -> None:
        """Fails all that is asked, now and later."""
        if self.error is not None:
            return
        self.error = error
        self.pool.stop.set()
        self._fail_unlogged(error)
        futures, self._futures = self._futures, {}
        for future in futures.values():
            future.set_exception(copy_of(error))
        self.changed.notify_all()
