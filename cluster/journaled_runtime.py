"""A runtime that can ask groups again what they were asked.

It stands between the driver's steps and the groups' ``RayRuntime``: logs what is asked in a ``Journal``, has
the groups copy their values now and then, and gives out futures of its own.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import jax
import numpy as np

from cluster.actor_calls import ActorCalls
from cluster.connection import Connection
from cluster.driver import LoadRequests, RayRuntime
from cluster.fleet import Fleet
from cluster.joined import failed
from cluster.pending_calls import copy_of
from cluster.recovery import Recovery, loss_of_values
from cluster.status import Status, while_recovering
from cluster.waits import SupersededError
from cluster.watchdog import Limits
from mpmd.errors import GroupDiedError, RecoveryError, StateLostError
from mpmd.program import Program
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.runtime.journal import (
    BEGINNING,
    Journal,
    Logged,
    LoggedFetch,
    LoggedSnapshot,
    LoggedStep,
    Outcome,
    Request,
    ResultChangedError,
)
from mpmd.runtime.protocol import LoadedProgram, RuntimeBase
from mpmd.runtime.requests import Handle, Released, StepReply, StepRequest

_DEATH_SECONDS = 90.0
"""When a snapshot has failed because of a death, the driver hears of the death within this time."""

FROM_DISK = "Start again from a checkpoint on disk"


class JournaledRuntime(RuntimeBase):
    """Implements ``mpmd.runtime.protocol.Runtime`` by another one, and remembers what that was asked.

    Args:
      fleet: the running processes.
      connections: the driver's connection with each of them, as ``ActorCalls`` takes them.
      limits: as of ``ActorCalls``.
      runtime_of: makes the other runtime, of calls on the processes.
      recovery: when to copy values.
      max_in_flight: how many steps may be under way.
    """

    def __init__(
        self,
        fleet: Fleet,
        connections: Sequence[Connection],
        limits: Limits,
        runtime_of: Callable[[ActorCalls], RayRuntime],
        recovery: Recovery,
        max_in_flight: int = MAX_IN_FLIGHT,
    ):
        self._num_groups = 1 + max(process.mpmd_idx for process in fleet.processes)
        super().__init__(self._num_groups, max_in_flight)
        self._fleet = fleet
        self._limits = limits
        self._recovery = recovery
        self._journal = Journal()
        self._copied_snapshot = BEGINNING  # the committed one, as far as the fleet knows
        self._loads: dict[int, LoadRequests] = {}
        self._unloaded = collections.deque[int]()  # programs of which the journal does not know it yet
        self._futures: dict[tuple[Request, int], Future] = {}
        self._dead: dict[int, GroupDiedError] = {}  # the groups that are being replaced
        self._is_paused = False  # nothing is asked of groups meanwhile
        self._error: RuntimeError | None = None  # why nothing works any more
        self._loss: StateLostError | None = None  # why there are no values with handles before the first one
        self._first_handle: Handle = 0
        # Guards all of the above. A reply may settle a call in the thread that makes it.
        self._changed = threading.Condition(threading.RLock())
        self._groups = runtime_of(self._calls(connections))
        self.processes_per_group = self._groups.processes_per_group

    def _calls(self, connections: Sequence[Connection]) -> ActorCalls:
        note_death = weakref.WeakMethod(self._note_death)

        def on_death(error: GroupDiedError) -> None:
            if (note := note_death()) is not None:
                note(error)

        return ActorCalls(
            self._fleet.actors,
            self._fleet.processes,
            self._fleet.places.placement_groups,
            connections,
            self._fleet.infos,
            self._limits,
            on_death,
        )

    @abc.abstractmethod
    def _note_death(self, error: GroupDiedError) -> None:
        """Is called in any thread when a group counts as dead."""

    # What callers ask.

    def load(self, program: Program) -> LoadedProgram:
        """As ``RayRuntime.load``. When a group dies meanwhile, loads again after the recovery."""
        self.check_process()
        while True:
            with self._changed:
                self._wait_until_running()
                if self._error is not None:
                    raise copy_of(self._error)
                attempt = self._journal.attempt
                self._unload_unused()
            try:
                loaded, requests = self._groups.load_with_requests(program)
            except GroupDiedError:
                self._wait_for_end_of(attempt)  # the recovery may be about to begin
                continue
            except RuntimeError:
                if attempt == self._journal.attempt:
                    raise
                continue
            with self._changed:
                if attempt == self._journal.attempt:
                    self._loads[loaded.number] = requests
                    return loaded
                self._groups.unload(loaded.number)  # new processes do not have it

    def unload(self, number: int) -> None:
        self._unloaded.append(number)

    def submit_step(self, requests: dict[int, StepRequest]) -> dict[int, Future[StepReply]]:
        """As in the protocol. Waits while groups recover, and for a snapshot that is late."""
        handles = {handle for request in requests.values() for handle in request.handles}
        with self._changed:
            self._wait_until_running(self._is_in_time)
            if (refusal := self._refusal(handles)) is not None:
                return {i: failed(copy_of(refusal)) for i in requests}
            released = self._take_released(requests)
            number = self.next_handle()
            step = self._journal.add_step(
                {
                    i: dataclasses.replace(request, step=number, released=released[i])
                    for i, request in requests.items()
                }
            )
            futures = {i: self._future_of(step, i) for i in requests}
            with self._failing_on_interrupt(step):
                self._ask_step(step, step.requests)
            if self._recovery.snapshot_is_due(self._journal):
                self._begin_snapshot()
            return futures

    def fetch(self, mpmd_idx: int, handle: Handle) -> Future[jax.Array | np.ndarray]:
        self.check_process()
        with self._changed:
            if (refusal := self._refusal([handle])) is not None:
                return failed(refusal)
            fetch = self._journal.add_fetch(mpmd_idx, handle)
            future = self._future_of(fetch, mpmd_idx)
            if not self._dead:
                with self._failing_on_interrupt(fetch):
                    self._ask_fetch(fetch)
            return future

    def measured_peaks(self) -> tuple[int | None, ...]:
        """As in the protocol; while groups recover, nothing is known of any."""
        return self._groups.measured_peaks()

    def status(self) -> Status:
        """As ``RayRuntime.status``. While groups recover, says which are being replaced."""
        self.check_process()
        dead = dict(self._dead)
        if not dead or self._error is not None:
            return self._groups.status()
        asked = collections.Counter(mpmd_idx for _, mpmd_idx in list(self._futures))
        return while_recovering(self._fleet.infos, dead, asked)

    def close(self) -> None:
        """Kills the actors; all calls that are under way fail. May be called again. Not in a fork."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._end(RuntimeError("the cluster mesh is closed"))
        self._groups.close()
        self._fleet.release()

    def _refusal(self, handles: Collection[Handle]) -> BaseException | None:
        """Why a request with these handles cannot be made, as a new error."""
        if self._error is not None:
            return copy_of(self._error)
        if self._loss is not None and min(handles, default=self._first_handle) < self._first_handle:
            return copy_of(self._loss)
        return None

    def _is_in_time(self) -> bool:
        """Whether a step need not wait for a snapshot; what is being saved does not keep it waiting."""
        if self._recovery.is_late(self._journal) and self._journal.keeps_copies and not self._dead:
            self._note(self._journal.drop_copies)
        return not self._recovery.is_late(self._journal)

    def _wait_until_running(self, is_free: Callable[[], bool] = lambda: True) -> None:
        """Waits until no group is being replaced or about to move, or nothing works any more."""
        self._changed.wait_for(
            lambda: self._error is not None or (not self._dead and not self._is_paused and is_free())
        )

    def _wait_for_end_of(
        self, attempt: int, seconds: float | None = None, unless: Callable[[], bool] = lambda: False
    ) -> None:
        """Waits until a group has died, or nothing works any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or attempt != self._journal.attempt or unless(), seconds
            )

    def _unload_unused(self) -> None:
        """Has groups drop, with what they are asked next, the programs that neither user nor replay needs."""
        while self._unloaded:
            self._journal.release_programs([self._unloaded.popleft()])
        for number in self._journal.take_unused_programs():
            self._loads.pop(number, None)
            self._groups.unload(number)

    def _take_released(self, groups: Iterable[int]) -> dict[int, Released]:
        """The values that groups are to drop with a request; a copy among them need not be made again."""
        released = {i: self._released.take(i) for i in groups}
        if self._journal.keeps_copies:
            freed = {handle for each in released.values() for handle in each.handles}
            self._note(lambda: self._journal.drop_copies(freed))
        return released

    def _future_of(self, request: Request, mpmd_idx: int) -> Future:
        future: Future = Future()
        future.set_running_or_notify_cancel()
        self._futures[request, mpmd_idx] = future
        return future

    @contextlib.contextmanager
    def _failing_on_interrupt(self, request: Request) -> Iterator[None]:
        """Fails a request that perhaps not all groups were asked, and whose replies nobody gets."""
        try:
            yield
        except BaseException as interrupt:
            unsent = failed(RuntimeError(f"the request was not sent to all groups: {interrupt!r}"))
            for mpmd_idx in request.groups:
                self._note_reply(self._journal.attempt, request, mpmd_idx, unsent)
            raise

    # What groups are asked, for the first time or again.

    def _ask(self, entry: Logged) -> None:
        match entry:
            case LoggedStep():
                number = self.next_handle()  # groups refuse those of before
                self._ask_step(
                    entry, {i: dataclasses.replace(r, step=number) for i, r in entry.requests.items()}
                )
            case LoggedFetch():
                self._ask_fetch(entry)
            case LoggedSnapshot():
                self._ask_snapshot(entry)

    def _ask_step(self, step: LoggedStep, requests: Mapping[int, StepRequest]) -> None:
        for mpmd_idx, reply in self._groups.submit_step(dict(requests)).items():
            self._listen(step, mpmd_idx, reply)

    def _ask_fetch(self, fetch: LoggedFetch) -> None:
        self._listen(fetch, fetch.mpmd_idx, self._groups.fetch(fetch.mpmd_idx, fetch.handle))

    def _listen(self, request: Request, mpmd_idx: int, reply: Future) -> None:
        attempt = self._journal.attempt
        reply.add_done_callback(functools.partial(self._note_reply, attempt, request, mpmd_idx))

    def _note_reply(self, attempt: int, request: Request, mpmd_idx: int, reply: Future) -> None:
        error = reply.exception()
        if isinstance(error, GroupDiedError):
            return  # the death itself is noted, and then all is asked again
        if error is None:
            self._note(lambda: self._journal.succeed(attempt, request, mpmd_idx, reply.result()))
        else:
            self._note(lambda: self._journal.fail(attempt, request, mpmd_idx, error))

    def _note(self, event: Callable[[], Iterable[Outcome]]) -> None:
        """Has the journal know of something, and does what follows from it."""
        with self._changed:
            if self._error is not None:
                return
            try:
                outcomes = event()
            except ResultChangedError as changed:
                self._give_up(RecoveryError(f"{changed}. {FROM_DISK}", changed.mpmd_idx), changed.__cause__)
                return
            if self._copied_snapshot != self._journal.committed:
                self._copied_snapshot = self._journal.committed
                self._fleet.mark_committed()
            self._unload_unused()
            for request, mpmd_idx, result, error in outcomes:
                future = self._futures.pop((request, mpmd_idx))
                if error is None:
                    future.set_result(result)
                else:
                    is_shared = isinstance(error, StateLostError)
                    future.set_exception(copy_of(error) if is_shared else error)
            self._changed.notify_all()

    # Snapshots.

    def _begin_snapshot(self) -> None:
        snapshot = self._journal.begin_snapshot(self._take_released(range(self._num_groups)))
        try:
            self._ask_snapshot(snapshot)
        except BaseException:  # an interrupt: perhaps nobody waits for the copies
            self._journal.abandon(snapshot)
            for mpmd_idx, released in snapshot.released.items():
                for handle in released.handles:
                    self._released.add_handle((mpmd_idx,), handle)
            raise

    def _ask_snapshot(self, snapshot: LoggedSnapshot) -> None:
        arguments = (snapshot.number, self._journal.committed)
        copying: list[Future] = []
        try:
            for mpmd_idx, released in snapshot.released.items():
                copying += self._groups.call_group(mpmd_idx, "snapshot", *arguments, released)
        except RuntimeError:
            return  # a group has died, and all is asked again; or the mesh was closed
        work = functools.partial(self._copy_away, self._journal.attempt, snapshot, arguments, copying)
        threading.Thread(target=work, name="mpmd snapshot", daemon=True).start()

    def _copy_away(
        self,
        attempt: int,
        snapshot: LoggedSnapshot,
        arguments: tuple[int, int],
        copying: Sequence[Future],
    ) -> None:
        """In a thread of its own: has copies that processes make travel to others, while steps run."""
        try:
            for copied in copying:
                copied.result()
            self._fleet.copy_away(*arguments, lambda: attempt == self._journal.attempt)
        except SupersededError:
            pass
        except Exception as error:  # a consequence of a death, of which the driver will hear, or a fault
            with self._changed:
                self._wait_for_end_of(attempt, _DEATH_SECONDS)
                if attempt == self._journal.attempt:
                    self._give_up(RuntimeError(f"the groups' values could not be copied: {error}"), error)
        else:
            self._note(lambda: self._journal.mark_copied(attempt, snapshot))

    def _lose_values(self, death: GroupDiedError, reason: str) -> None:
        """No group has a value any more. What comes from before fails; what is made anew does not."""
        self._loss = loss = loss_of_values(death, reason, self.last_checkpoint)
        self._first_handle = self.next_handle()
        self.arguments.forget_before(self._first_handle)
        self._copied_snapshot = BEGINNING
        self._note(lambda: self._journal.lose_values(loss))

    def _ask_again(self) -> list[LoggedStep]:
        """Asks all that the journal has. Returns the steps."""
        entries = self._journal.go_back()
        for entry in entries:
            self._ask(entry)
        self._changed.notify_all()
        return [entry for entry in entries if isinstance(entry, LoggedStep)]

    def _give_up(self, error: RuntimeError, cause: BaseException | None = None) -> None:
        error.__cause__ = cause
        self._end(error)
        # Not here: it waits for a thread that may wait for this one.
        threading.Thread(target=self._fleet.release, name="mpmd end", daemon=True).start()

    def _end(self, error: RuntimeError) -> None:
        """Fails all that is asked, now and later."""
        if self._error is not None:
            return
        self._error = error
        self._fleet.stop.set()
        futures, self._futures = self._futures, {}
        for future in futures.values():
            future.set_exception(copy_of(error))
        self._changed.notify_all()
