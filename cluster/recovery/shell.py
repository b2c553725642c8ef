"""Carries out the actions of ``membership`` on Ray, and tells it of events.

A job that follows from another job runs in its thread, any other in a new one: a recovery is one thread.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cluster.driver.calls.post_mortem import is_death, raised_by
from cluster.driver.ray_session import RaySession
from cluster.recovery import actions as do
from cluster.recovery import procedures
from cluster.recovery.copies import Copies
from cluster.recovery.events import Closed, Died, Done, Event, Faulted, Freed
from cluster.recovery.ledger import Ledger
from cluster.recovery.logged import Logged, LoggedSnapshot
from cluster.recovery.report import CorruptionReport, RecoveryReport
from cluster.tcp.connection import Connection
from mpmd.runtime.requests import Handle
from mpmd.runtime.survey import take_digests

_LOOK_SECONDS = 1.0
"""The seconds between two looks whether groups are to move."""

_DEATH_SECONDS = 90.0
"""The seconds within which the driver hears of a death that made a snapshot fail."""

_SAVE_SECONDS = 10.0
"""The seconds that a checkpoint may keep a group on a node that is to end; other moves wait for it."""


class Shell:
    """Looks after the groups of a mesh, by what their ``Membership`` says.

    Args:
      ledger: the requests to groups.
      copies: of the values of processes.
      on_recovery: is called with a report of each recovery and move.
      on_corruption: is called with a report of wrong bits.
    """

    def __init__(
        self,
        ledger: Ledger,
        copies: Copies,
        on_recovery: Callable[[RecoveryReport], None],
        on_corruption: Callable[[CorruptionReport], None],
    ):
        self._ledger = ledger
        self._membership = ledger.membership
        self._groups = ledger.groups
        self._processes = ledger.processes
        self._copies = copies
        self._on_recovery = on_recovery
        self._on_corruption = on_corruption
        self._session = RaySession()
        self._is_acting = self._is_looking = False
        ledger.tell = _weakly(self.tell)

    def attach(self, connections: Sequence[Connection]) -> None:
        """From now on, groups are asked over these connections, and their deaths are noted."""
        tell = self._ledger.tell
        self._groups.attach(self._processes.calls(connections, lambda error: tell(Died(error))))

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
        ledger, membership = self._ledger, self._membership
        with ledger.changed:
            is_cause, self._is_acting = not self._is_acting, True
            try:
                threads = [self._carry_out_all(membership.handle(event))]
                while is_cause and (actions := membership.advance()):  # not in the middle of other actions
                    threads.append(self._carry_out_all(actions))
            finally:
                self._is_acting = not is_cause
                ledger.changed.notify_all()
        return [jobs for jobs in threads if jobs]

    def _carry_out_all(self, actions: do.Actions) -> list[do.Job]:
        self._ledger.unload_unused()
        jobs = []
        for action in actions:
            if isinstance(action, do.Job):
                jobs.append(action)
            else:
                self._carry_out(action)
        return jobs

    def _carry_out(self, action: do.Action) -> None:
        ledger = self._ledger
        match action:
            case do.Tell(outcomes):
                ledger.settle(outcomes)
            case do.Attach(connections):
                self.attach(connections)
            case do.Disconnect(connections):
                for connection in connections:
                    connection.close()
            case do.LoseValues(errors):
                ledger.lose_values(errors)
            case do.ReplayLog(entries):
                self._replay(entries)
            case do.BeginSnapshot():
                ledger.begin_snapshot()
            case do.EndRewind():
                ledger.end_rewind(action)
            case do.ReportCorruption(report):
                self._on_corruption(report)
                print(f"cluster: {report}", file=sys.stderr, flush=True)
            case do.MarkCommitted():
                self._copies.mark_committed()
            case do.GiveBack(snapshot):
                ledger.give_back(snapshot.released)
            case do.Say(message):
                if not self._processes.stop.is_set() and self._session.is_connected:  # which may be why
                    print(f"cluster: {message}", file=sys.stderr, flush=True)
            case do.End(ending):
                ledger.end(ending)

    def _replay(self, entries: Sequence[Logged]) -> None:
        for entry in entries:
            if isinstance(entry, LoggedSnapshot):
                self._ledger.ask_for_copies(entry)
            else:
                self._ledger.ask(entry)

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
            self._processes.release()
            raise

    def _run(self, job: do.Job) -> Any:
        processes, copies, ledger = self._processes, self._copies, self._ledger
        match job:
            case do.Detach(reason):
                self._groups.detach(reason)
            case do.Recover():
                return procedures.recover(job, processes, copies, ledger.loads)
            case do.GoBack():
                return procedures.go_back(job, copies)
            case do.Rewind():
                digests = functools.partial(take_digests, self._groups, self._membership.logged)
                return procedures.rewind(job, copies, ledger.repeat, digests)
            case do.ReportRecovery():
                self._report(job)
            case do.StartSpares():
                processes.spares.start_missing()
            case do.Look():
                try:
                    return processes.groups_to_move()
                finally:
                    self._is_looking = False
            case do.Prepare():
                return self._prepare(job)
            case do.Discard():
                processes.spares.discard()
            case do.CopyAway(attempt, snapshot, base, copied):
                for each in copied:
                    each.result()
                journal = self._membership.journal
                copies.copy_away(snapshot.number, base, lambda: attempt == journal.attempt)
            case do.AwaitDeath():
                if processes.find_dead() - self._membership.left_out.dead.keys():
                    self._await(job, _DEATH_SECONDS)
            case do.AwaitCheckpoints():
                self._await(job, _SAVE_SECONDS)
            case do.ReleaseAll():
                processes.release()
        return None

    def _prepare(self, job: do.Prepare) -> set[int] | None:
        job.phases.enter("prepared")
        self._groups.ask_health()
        has_place = self._processes.prepare_move(job.mpmd_idx, job.kind)
        job.phases.enter("copied")
        return self._processes.find_dead() if has_place else None

    def _await(self, job: do.AwaitDeath | do.AwaitCheckpoints, seconds: float) -> None:
        with self._ledger.changed:
            self._ledger.changed.wait_for(lambda: not self._membership.awaits(job), seconds)

    def _report(self, job: do.ReportRecovery) -> None:
        job.phases.enter(None)
        sharing = {
            process.mpmd_idx: process.shares_with
            for process in self._processes.infos
            if process.mpmd_idx in job.report.mpmd_idxs and process.shares_with is not None
        }
        report = dataclasses.replace(job.report, shares_with=sharing)
        self._on_recovery(report)
        print(f"cluster: {report}", file=sys.stderr, flush=True)

    # Moves.

    def start(self) -> None:
        """Has a thread look after the places of groups, as long as this is in use."""
        watching = weakref.ref(self), self._ledger.freed
        threading.Thread(target=_watch, args=watching, name="mpmd places", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        return self._membership.error is not None or not self._session.is_connected

    def look_after(self) -> None:
        """Moves the groups that are to move, in another thread. Is called now and then, by one thread."""
        if not self._is_looking and not self._membership.dead and not self._membership.moves.is_under_way:
            self._is_looking = True
            self._start([do.Look()])

    def wake(self) -> None:
        """Has the groups that are to move looked for soon."""
        self._ledger.freed.put(None)


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
    return Faulted(job, error, by_death=is_death(error))


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
