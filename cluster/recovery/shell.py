"""Carries out the actions of ``membership`` on Ray, and tells it of events.

A job that follows from another job runs in its thread, any other in a new one: a recovery is one thread.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cluster.driver.calls.pending_calls import copy_of
from cluster.driver.calls.ray_errors import is_death, raised_by
from cluster.driver.ray_session import RaySession
from cluster.recovery import actions as do
from cluster.recovery import procedures
from cluster.recovery.events import Closed, Died, Done, Event, Faulted, Freed
from cluster.recovery.logged import Logged, LoggedSnapshot
from cluster.recovery.migrations import Migrations
from cluster.recovery.report import CorruptionReport, RecoveryReport
from cluster.recovery.requests import Requests
from cluster.start.connect import ProcessLostError
from cluster.tcp.connection import Connection
from mpmd.runtime.requests import Handle
from mpmd.runtime.survey import take_digests

_LOOK_SECONDS = 1.0
"""The seconds between two looks whether groups are to move."""


class Shell:
    """Looks after the groups of a mesh, by what their ``Membership`` says.

    Args:
      requests: what groups were asked.
      on_recovery: is called with a report of each recovery and move.
      on_corruption: is called with a report of wrong bits.
    """

    def __init__(
        self,
        requests: Requests,
        on_recovery: Callable[[RecoveryReport], None],
        on_corruption: Callable[[CorruptionReport], None],
    ):
        self._requests = requests
        self._membership = requests.membership
        self._groups = requests.groups
        self._pool = requests.pool
        self._on_recovery = on_recovery
        self._on_corruption = on_corruption
        self._session = RaySession()
        self._migrations = Migrations(self._pool)
        self._is_acting = self._is_looking = False
        requests.tell = _weakly(self.tell)

    def attach(self, connections: Sequence[Connection]) -> None:
        """From now on, groups are asked over these connections, and their deaths are noted."""
        tell = self._requests.tell
        self._groups.attach(self._pool.calls(connections, lambda error: tell(Died(error))))

    # Events, and what follows.

    def tell(self, event: Event) -> None:
        """Tells the membership of an event. May be called in any thread, and does not wait for jobs."""
        for jobs in self._act(event):
            self._start(jobs)

    def _start(self, jobs: Sequence[do.Job]) -> None:
        name = f"mpmd {type(jobs[0]).__name__}"
        threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True).start()

    def _act(self, event: Event) -> list[list[do.Job]]:
        """Carries out the actions that follow from an event. Returns the jobs, a list for each thread."""
        requests, membership = self._requests, self._membership
        with requests.changed:
            is_cause, self._is_acting = not self._is_acting, True
            try:
                threads = [self._carry_out_all(membership.handle(event))]
                while is_cause and (actions := membership.advance()):  # not in the middle of other actions
                    threads.append(self._carry_out_all(actions))
            finally:
                self._is_acting = not is_cause
                requests.changed.notify_all()
        return [jobs for jobs in threads if jobs]

    def _carry_out_all(self, actions: do.Actions) -> list[do.Job]:
        self._requests.unload_unused()
        jobs = []
        for action in actions:
            if isinstance(action, do.Job):
                jobs.append(action)
            else:
                self._carry_out(action)
        return jobs

    def _carry_out(self, action: do.Action) -> None:
        requests = self._requests
        match action:
            case do.Tell(outcomes):
                requests.settle(outcomes)
            case do.Attach(connections):
                self.attach(connections)
            case do.Disconnect(connections):
                for connection in connections:
                    connection.close()
            case do.LoseValues(error):
                requests.lose_values(error)
            case do.ForgetValues(groups):
                requests.forget_values(groups)
            case do.Replay(entries):
                self._replay(entries)
            case do.BeginSnapshot():
                requests.begin_snapshot()
            case do.EndRewind():
                requests.end_rewind(action)
            case do.ReportCorruption(report):
                self._on_corruption(report)
                print(f"cluster: {report}", file=sys.stderr, flush=True)
            case do.MarkCommitted():
                self._pool.copies.mark_committed()
            case do.GiveBack(snapshot):
                requests.give_back(snapshot.released)
            case do.Say(message):
                if not self._pool.stop.is_set() and self._session.is_connected:  # which may be why
                    print(f"cluster: {message}", file=sys.stderr, flush=True)
            case do.End(ending):
                requests.end(ending)

    def _replay(self, entries: Sequence[Logged]) -> None:
        for entry in entries:
            if isinstance(entry, LoggedSnapshot):
                self._requests.ask_for_copies(entry)
            else:
                self._requests.ask(entry)

    def _work(self, jobs: Sequence[do.Job]) -> None:
        """Carries out jobs, and all that follows, in this thread; what else may happen, in other threads."""
        waiting = collections.deque(jobs)
        while waiting:
            job = waiting.popleft()
            if self._membership.is_void(job):
                continue
            with self._ending_on_fault():
                try:
                    event: Event = Done(job, self._run(job))
                except BaseException as error:  # whatever it is, those who wait have to know
                    event = _fault(job, error)
                for number, following in enumerate(self._act(event)):
                    if number or waiting:
                        self._start(following)
                    else:
                        waiting.extend(following)

    @contextlib.contextmanager
    def _ending_on_fault(self) -> Iterator[None]:
        """A context in which an action that cannot be carried out ends the run, and not the thread alone."""
        try:
            yield
        except BaseException as error:
            self.tell(Closed(RuntimeError(f"the groups cannot be looked after: {error!r}")))
            self._pool.release()
            raise

    def _run(self, job: do.Job) -> Any:
        """Returns the result of a job."""
        pool, requests = self._pool, self._requests
        match job:
            case do.Detach(reason):
                self._groups.detach(reason)
            case do.Recover():
                return procedures.recover(job, pool, requests.loads)
            case do.GoBack():
                return procedures.go_back(job, pool)
            case do.Rewind():
                digests = functools.partial(take_digests, self._groups, requests.logged)
                return procedures.rewind(job, pool, requests.repeat, digests)
            case do.Report(recovered):
                self._report(recovered)
            case do.StartSpares():
                pool.replacements.start_spares()
            case do.Look():
                try:
                    return self._migrations.groups_to_move()
                finally:
                    self._is_looking = False
            case do.Prepare():
                return self._prepare(job)
            case do.Discard():
                pool.replacements.discard()
            case do.CopyAway(attempt, snapshot, base, copied):
                for each in copied:
                    each.result()
                journal = self._membership.journal
                pool.copies.copy_away(snapshot.number, base, lambda: attempt == journal.attempt)
            case do.FindDead():
                return pool.find_dead()
            case do.Timer(seconds):
                with requests.changed:
                    requests.changed.wait_for(lambda: not self._membership.awaits(job), seconds)
            case do.Release():
                pool.release()
        return None

    def _prepare(self, job: do.Prepare) -> set[int] | None:
        job.phases.enter("prepared")
        self._groups.ask_health()
        has_place = self._migrations.prepare(job.mpmd_idx, job.kind)
        job.phases.enter("copied")
        return self._pool.find_dead() if has_place else None

    def _report(self, recovered: do.Recovered) -> None:
        recovered.phases.enter(None)
        report = RecoveryReport(
            mpmd_idxs=tuple(sorted(recovered.groups)),
            reason=str(recovered.death),
            step=recovered.step.ordinal if recovered.step else None,
            num_replayed=sum(step.failure is None for step in recovered.steps),
            seconds=recovered.phases.seconds,
            lost=recovered.lost,
            kind=recovered.kind,
            shares_with={
                process.mpmd_idx: process.shares_with
                for process in self._pool.infos
                if process.mpmd_idx in recovered.groups and process.shares_with is not None
            },
        )
        self._on_recovery(report)
        print(f"cluster: {report}", file=sys.stderr, flush=True)

    # Moves.

    def start(self) -> None:
        """Has a thread look after the places of groups, as long as this is in use."""
        watching = weakref.ref(self), self._requests.freed
        threading.Thread(target=_watch, args=watching, name="mpmd places", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether nothing works any more, or Ray was shut down."""
        return self._membership.error is not None or not self._session.is_connected

    def look_after(self) -> None:
        """Moves the groups that are to move, in another thread. Is called now and then, by one thread."""
        if not self._is_looking and not self._membership.dead and not self._membership.moves.is_under_way:
            self._is_looking = True
            self._start([do.Look()])

    def wake(self) -> None:
        """Has the groups that are to move looked for soon."""
        self._requests.freed.put(None)

    def resize(self, num_places: int, timeout: float) -> None:
        """Reserves devices for the first ``num_places`` groups; the remaining groups share these devices.

        Blocks until the groups have moved, and the resources that they have left are given back.

        Args:
          num_places: from 1 to the number of groups.

        Raises: ``RuntimeError`` when there is no room within ``timeout`` seconds, and at once when a group is
          dead that recovery leaves out; groups then move as soon as they can.
        """
        requests, membership, allocations = self._requests, self._membership, self._pool.allocations
        if num_places < requests.num_groups and not allocations.can_share:
            raise RuntimeError(
                "resize: groups may not share devices here: the mesh was launched with "
                "Recovery(share_after=None), or on a platform whose devices belong to one process"
            )
        with requests.changed:
            allocations.num_own = num_places
            self.wake()
            requests.changed.wait_for(
                lambda: membership.error or self._is_settled or membership.left_out.fault_of(self._late),
                timeout,
            )
            if membership.error is not None:
                raise copy_of(membership.error)
            if fault := membership.left_out.fault_of(self._late):
                raise RuntimeError(f"resize({num_places}): {fault}")
            if late := self._late:
                said = membership.moves.said
                why = "".join(f"; {said[mpmd_idx]}" for mpmd_idx in late if mpmd_idx in said)
                names = ", ".join(f"group {mpmd_idx}" for mpmd_idx in late)
                raise RuntimeError(
                    f"resize({num_places}): {names} did not move within {timeout:g} s{why}. "
                    "A group moves by itself as soon as there is a place for it"
                )

    @property
    def _is_settled(self) -> bool:
        """Whether each group is where it is to be, and no move is under way: its end gives resources back."""
        return not self._late and not self._membership.moves.is_under_way

    @property
    def _late(self) -> list[int]:
        """The groups that share devices but should not, or should but do not; else, the groups that move."""
        allocations = self._pool.allocations
        sharing = {p.mpmd_idx for p in self._pool.infos if p.shares_with is not None}
        late = [i for i in range(self._requests.num_groups) if (i in sharing) == (i < allocations.num_own)]
        return late or sorted(self._membership.dead)


def _weakly(tell: Callable[[Event], None]) -> Callable[[Event], None]:
    """Returns ``tell`` as a function that does not keep its object alive, and then does nothing."""
    alive = weakref.WeakMethod(tell)

    def tell_if_alive(event: Event) -> None:
        if (method := alive()) is not None:
            method(event)

    return tell_if_alive


def _fault(job: do.Job, error: BaseException) -> Faulted:
    if not isinstance(job, do.CopyAway):
        return Faulted(job, error)
    error = raised_by(error)
    return Faulted(job, error, by_death=is_death(error) or isinstance(error, ProcessLostError))


def _watch(shell: weakref.ref[Shell], wake: queue.SimpleQueue[Handle | None]) -> None:
    """Looks after a shell now and then, in a thread that does not keep the shell alive."""
    while True:
        freed = None
        with contextlib.suppress(queue.Empty):
            freed = wake.get(timeout=_LOOK_SECONDS)
        alive = shell()
        if alive is None or alive.has_ended:
            return
        if freed is None:
            alive.look_after()
        else:
            alive.tell(Freed(freed))
        del alive
