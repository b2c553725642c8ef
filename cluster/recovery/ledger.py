"""Requests to groups that can be repeated after a death, and whether groups can be asked now.

A request is logged in a ``Journal``, and then sent by the groups' ``RayRuntime``. The caller gets a future of
this module's own, which outlives the groups' processes.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from cluster.driver.calls.joined import awaited, failed
from cluster.driver.calls.pending_calls import copy_of
from cluster.driver.runtime import RayRuntime
from cluster.recovery.journal import Journal, Outcome
from cluster.recovery.left_out import LeftOut
from cluster.recovery.lock import Lock
from cluster.recovery.logged import Asked, LoggedStep
from cluster.recovery.policy import Recovery
from cluster.recovery.releases import Releases
from mpmd.errors import GroupDiedError, RecoveryError, StateLostError
from mpmd.runtime.argument_cache import ArgumentCache
from mpmd.runtime.interrupts import DeferredInterrupt
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.protocol import ReleaseQueue
from mpmd.runtime.requests import (
    Capture,
    CopyOut,
    Handle,
    Released,
    Request,
    StepRequest,
    Write,
)


class State(enum.Enum):
    """The state of all groups together.

    ``RUNNING``: groups are asked for what the user wants. ``QUIESCING``: new requests wait until groups have
    answered all earlier requests, which is where a snapshot, a rewind, a move, and going back for a failed
    step begin. ``RECOVERING``: groups are replaced or go back. ``ENDED``: nothing works any more.
    """

    RUNNING, QUIESCING, RECOVERING, ENDED = "running", "quiescing", "recovering", "ended"


class _Writing(NamedTuple):
    mpmd_idx: int
    request: Write
    future: Future


class Ledger:
    """The requests to groups, their futures, and the state of all groups together.

    Args:
      groups: sends the requests; is connected later.
      policy: when a snapshot is late, and whether groups digest the messages of logged steps.
      left_out: the groups that are neither logged nor copied.
      released: handles that the user has released and groups were not told to drop yet.
      next_handle: returns numbers that ascend.
      arguments: the user's arguments that groups keep for later steps.

    Attributes:
      changed: guards all attributes, and is notified of each change. Futures are settled when it is released.
      wake: begins the operation that a change asks for; is called with the lock and does not wait.
      state: of all groups together.
      error: why nothing works any more.
      dead: the groups that are being replaced, and why.
      releases: what groups are to drop with a later request.
      unwritten: copies that are perhaps still to be written to storage; shrinks without the lock.
      unlogged: the answers that are awaited to requests that are not logged.
    """

    def __init__(
        self,
        groups: RayRuntime,
        policy: Recovery,
        left_out: Collection[int],
        released: ReleaseQueue,
        next_handle: Callable[[], Handle],
        arguments: ArgumentCache,
    ):
        self.groups = groups
        self.changed = Lock()
        self.wake: Callable[[], object] = lambda: None
        self.state = State.RUNNING
        self.error: RuntimeError | None = None
        self.journal = Journal()
        self.left_out = LeftOut(frozenset(left_out))
        self.logged = frozenset(range(len(groups.processes_per_group))) - self.left_out.groups
        self.dead: dict[int, GroupDiedError] = {}
        self.unwritten: set[Handle] = set()
        self.unlogged: set[Future] = set()
        self.releases = Releases(groups, self.journal, released)
        self._policy = policy
        self._next_handle = next_handle
        self._arguments = arguments
        self._takes_digests = policy.verify_every is not None
        self._futures: dict[tuple[Asked, int], Future] = {}
        self._writes: dict[Handle, _Writing] = {}  # that are not answered, by their copies
        self._being_written: set[Handle] = set()  # the copies of writes that a group has not answered
        self._unanswered: set[tuple[Asked, int]] = set()  # that groups were asked in this attempt
        # By group, the first handle of the values that it may have, and why earlier ones are lost.
        self._lost_before: dict[int, tuple[Handle, RuntimeError]] = {}

    # Whether groups can be asked.

    @property
    def is_running(self) -> bool:
        return self.state is State.RUNNING

    @property
    def is_quiet(self) -> bool:
        return self.state is State.QUIESCING and not self._unanswered

    @property
    def awaits_checkpoint(self) -> bool:
        return self.journal.keeps_copies or bool(self.unwritten)

    def resume(self) -> None:
        self.state = State.RUNNING
        for entry in self.journal.unasked:
            self.ask(entry)
        self.notify()

    def suspend(self) -> None:
        self.state = State.RECOVERING
        self.journal.suspend()
        self._unanswered.clear()

    def go_back(self) -> tuple[Asked, ...]:
        """All groups have gone back. Returns the requests that they are to be asked again, in order."""
        if (given_up := self.journal.snapshot) is not None:
            self.releases.give_back(given_up.released)
        self.state = State.RUNNING
        self.dead.clear()
        return self.journal.go_back()

    def notify(self) -> None:
        self.releases.unload_unused()
        self.wake()
        self.changed.notify_all()

    def refusal(self, requests: Mapping[int, Request]) -> BaseException | None:
        """A new error that says why groups cannot be asked for values that requests name."""
        if self.error is not None:
            return copy_of(self.error)
        lost = self.left_out.lost
        losses: list[BaseException] = [
            loss
            for mpmd_idx, (first, loss) in self._lost_before.items()
            if mpmd_idx in requests and min(requests[mpmd_idx].handles, default=first) < first
        ]
        if lost:  # which may lose entries meanwhile
            named = (lost.get(handle) for each in requests.values() for handle in each.handles)
            losses += [loss for loss in named if loss is not None]
        if not losses:
            return None
        for request in requests.values():
            if isinstance(request, StepRequest):  # what reads its results is refused, too
                lost |= dict.fromkeys(request.outputs, losses[0])
        return copy_of(losses[0])

    def wait_until_running(self) -> None:
        self.changed.wait_for(lambda: self.error is not None or self.is_running)

    def wait_to_submit(self) -> None:
        """As ``wait_until_running``, and until the snapshot under way is in time."""
        self.changed.wait_for(lambda: self.error is not None or self._may_submit())

    def _may_submit(self) -> bool:
        if self.is_running and self._policy.is_late(self.journal) and self.journal.keeps_copies:
            self.drop_copies()  # what is being saved does not keep a step waiting
        return self.is_running and not self._policy.is_late(self.journal)

    def wait_for(self, condition: Callable[[], object], timeout: float | None = None) -> bool:
        """Waits until the condition holds, and returns whether it does. Raises why nothing works any more."""
        with self.changed:
            holds = self.changed.wait_for(lambda: self.error is not None or condition(), timeout)
            if self.error is not None:
                raise copy_of(self.error)
            return bool(holds)

    def wait_for_end_of(self, attempt: int) -> None:
        self.wait_for(lambda: attempt != self.journal.attempt)

    def count_waiting(self) -> Mapping[int, int]:
        return collections.Counter(i for _, i in list(self._futures))

    def drop_copies(self, copies: Collection[Handle] | None = None) -> None:
        self.journal.drop_copies(copies)
        self.notify()

    # What groups are asked, for the first time or again.

    def ask_once(
        self, requests: Mapping[int, Request], released: Mapping[int, Released]
    ) -> dict[int, Future]:
        """Sends requests that are not logged: groups are not asked again after a death."""
        for mpmd_idx, each in released.items():
            self.groups.release(mpmd_idx, each)
        answers: dict[int, Future] = {}
        with DeferredInterrupt():  # an answer that never ends would keep groups from being replaced
            for mpmd_idx, reply in self.groups.ask(requests).items():
                answer = answers[mpmd_idx] = awaited()
                self.unlogged.add(answer)
                reply.add_done_callback(functools.partial(self._end_unlogged, requests[mpmd_idx], answer))
        return answers

    def _end_unlogged(self, request: Request, answer: Future, reply: Future) -> None:
        with self.changed:
            if answer not in self.unlogged:
                return  # the run has ended
            self.unlogged.remove(answer)
            error = self.left_out.explain(request, reply.exception())
            self._settle(answer, None if error else reply.result(), error)
            self.notify()

    def ask_first(self, request: Asked) -> dict[int, Future]:
        """Sends requests for the first time. Returns the user's future of each group's answer."""
        futures = {mpmd_idx: awaited() for mpmd_idx in request.requests}
        self._futures |= {(request, mpmd_idx): future for mpmd_idx, future in futures.items()}
        try:
            self.ask(request)
        except BaseException as interrupt:  # perhaps not all groups were asked, and nobody gets their replies
            unsent = RuntimeError(f"the request was not sent to all groups: {interrupt!r}")
            for mpmd_idx in request.requests:
                self._record(self.journal.attempt, Outcome(request, mpmd_idx, error=unsent))
            raise
        return futures

    def ask(self, request: Asked) -> None:
        """Asks groups, for the first time or again. While groups do not run, ``resume`` will ask them."""
        if not self.is_running:
            return
        attempt = self.journal.attempt
        self._unanswered.update((request, mpmd_idx) for mpmd_idx in request.requests)
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
        with self.changed:
            self._record(attempt, Outcome(request, mpmd_idx, result, error))
            if isinstance(copying := request.requests[mpmd_idx], CopyOut):
                self._ask_write(copying.copy)

    def _record(self, attempt: int, outcome: Outcome) -> None:
        """A group has answered. Its death is no answer: when groups have gone back, it is asked again."""
        journal = self.journal
        if self.error is not None or isinstance(outcome.error, GroupDiedError):
            return
        self._unanswered.discard((outcome.request, outcome.mpmd_idx))
        try:
            self._tell(journal.answer(attempt, outcome))
        except RecoveryError as changed:
            self.end(changed)
        if journal.failed is not None and not journal.is_suspended:
            if self.is_running:
                self.state = State.QUIESCING
            journal.suspend()
        self.notify()

    # Copies that groups write to storage, whatever dies meanwhile.

    def write(self, mpmd_idx: int, request: Write) -> Future[list[int]]:
        """Has a group write a copy. A death of the group ends it only if the copy cannot be made again."""
        if self.dead and self.journal.find_copy(request.copy) is None:
            return failed(copy_of(next(iter(self.dead.values()))))
        writing = self._writes[request.copy] = _Writing(mpmd_idx, request, awaited())
        self._ask_write(request.copy)
        return writing.future

    def _ask_write(self, copy: Handle) -> None:
        """Has a group write a copy that the user wants written, that it has made, and is not writing."""
        writing, copying = self._writes.get(copy), self.journal.find_copy(copy)
        is_there = copying is None or not (copying.waiting or self.journal.is_suspended)
        if writing is None or self.dead or not is_there or copy in self._being_written:
            return
        self._being_written.add(copy)
        for written in self.groups.ask({writing.mpmd_idx: writing.request}).values():
            written.add_done_callback(functools.partial(self._note_written, self.journal.attempt, copy))

    def _note_written(self, attempt: int, copy: Handle, written: Future[list[int]]) -> None:
        with self.changed:
            self._being_written.discard(copy)
            error, is_current = written.exception(), attempt == self.journal.attempt
            # What is written stays written, whichever attempt has asked for it.
            counts = error is None or (is_current and not isinstance(error, GroupDiedError))
            if copy not in self._writes:
                return
            if not counts and self.journal.find_copy(copy) is not None:
                if not is_current:  # otherwise its group has died, and makes the copy again
                    self._ask_write(copy)
                return
            self._settle(self._writes.pop(copy).future, None if error else written.result(), error)
            self.drop_copies({copy})

    # What the user is told.

    def _tell(self, outcomes: Iterable[Outcome]) -> None:
        for request, mpmd_idx, result, error in outcomes:
            self._settle(self._futures.pop((request, mpmd_idx)), result, error)

    def lose_values(self, losses: Mapping[int, RuntimeError]) -> None:
        """Groups have lost their values. Requests for these fail; later values are not affected."""
        first = self._next_handle()
        self._lost_before |= {mpmd_idx: (first, loss) for mpmd_idx, loss in losses.items()}
        self._arguments.forget_before(first, losses)
        for copy, writing in list(self._writes.items()):
            if writing.mpmd_idx in losses:
                self._settle(self._writes.pop(copy).future, None, losses[writing.mpmd_idx])

    def lose_all(self, error: RuntimeError) -> None:
        self.lose_values(dict.fromkeys(self.logged, error))
        self._tell(self.journal.lose_values(error))

    def end(self, error: RuntimeError) -> None:
        if self.error is not None:
            return
        self.error, self.state = error, State.ENDED
        writes = [writing.future for writing in self._writes.values()]
        futures = [*self._futures.values(), *self.unlogged, *writes]
        self._futures.clear()
        self._writes.clear()
        self.unlogged.clear()
        for future in futures:
            self._settle(future, None, copy_of(error))
        self.notify()

    def _settle(self, future: Future, result: object, error: BaseException | None) -> None:
        if error is None:
            self.changed.defer(functools.partial(future.set_result, result))
        else:
            error = copy_of(error) if isinstance(error, StateLostError) else error
            self.changed.defer(functools.partial(future.set_exception, error))
