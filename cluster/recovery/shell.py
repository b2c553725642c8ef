"""Carries out the actions of ``membership`` on Ray, and tells it of events.

A job that follows from another job runs in its thread, any other in a new one: a recovery is one thread.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cluster.driver.calls.pending_calls import copy_of
from cluster.driver.calls.ray_errors import is_death, raised_by
from cluster.driver.ray_session import RaySession
from cluster.recovery import actions as do
from cluster.recovery.allocations import NoAllocationError, NodeGoneError
from cluster.recovery.events import Died, Done, Event, Faulted, Lost
from cluster.recovery.keepers import CopiesLostError
from cluster.recovery.liveness_waiter import SupersededError
from cluster.recovery.logged import LoggedSnapshot
from cluster.recovery.migrations import Migrations
from cluster.recovery.report import CorruptionReport, RecoveryReport
from cluster.recovery.requests import Requests
from cluster.start.connect import ProcessLostError
from cluster.tcp.connection import Connection
from mpmd.runtime.survey import take_digests
from mpmd.util.stopwatch import Stopwatch

_LOOK_SECONDS = 1.0
"""The seconds between two looks whether groups are to move."""

_SAVE_SECONDS = 10.0
"""The seconds that a checkpoint may keep a group on a node that is to end; other moves wait for it."""

_DEATH_SECONDS = 90.0
"""The seconds within which the driver hears of a death that made a snapshot fail."""

_POLL_SECONDS = 0.05
"""The seconds between two checks of a condition that nobody notifies, in a wait with a limit."""

_PHASES: dict[type, str] = {
    do.Prepare: "prepared",
    do.AwaitSaves: "copied",
    do.AwaitLeftOut: "started",
    do.FindDead: "copied",
    do.AwaitSnapshot: "copied",
    do.Kill: "started",
    do.Reset: "started",
    do.Start: "started",
    do.Open: "started",
    do.AwaitReset: "started",
    do.Connect: "connected",
    do.Load: "loaded",
    do.Restore: "restored",
    do.ConnectDriver: "connected",
    do.AwaitReplay: "replayed",
}
"""The phase of a ``RecoveryReport`` for which the time of a job counts."""


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
        self._wake = threading.Event()
        requests.tell = _weakly(self.tell)

    def attach(self, connections: Sequence[Connection]) -> None:
        """From now on, groups are asked over these connections, and their deaths are noted."""
        tell = self._requests.tell
        self._groups.attach(self._pool.calls(connections, lambda error: tell(Died(error))))

    # Events, and what follows.

    def tell(self, event: Event) -> None:
        """Tells the membership of an event. May be called in any thread, and does not wait for jobs."""
        if jobs := self._act(event):
            name = f"mpmd {type(jobs[0]).__name__}"
            threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True).start()

    def _act(self, event: Event) -> list[do.Job]:
        """Carries out the actions that follow from an event. Returns the jobs."""
        requests, jobs = self._requests, []
        with requests.changed:
            actions = self._membership.handle(event)
            requests.unload_unused()
            for action in actions:
                if isinstance(action, do.Job):
                    jobs.append(action)
                else:
                    self._carry_out(action)
            requests.changed.notify_all()
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
                for entry in entries:
                    if isinstance(entry, LoggedSnapshot):
                        requests.ask_for_copies(entry)
                    else:
                        requests.ask(entry)
            case do.BeginSnapshot():
                requests.begin_snapshot()
            case do.Repeat(number, entries, refused):
                requests.repeat(number, entries, refused)
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

    def _work(self, jobs: Sequence[do.Job]) -> None:
        """Carries out jobs, and all that follows, in this thread."""
        waiting, watch = collections.deque(jobs), Stopwatch()
        while waiting:
            job = waiting.popleft()
            if self._membership.is_void(job):
                continue
            if isinstance(job, do.Prepare):
                watch = Stopwatch()
            phase = _PHASES.get(type(job))
            with watch(phase) if phase else contextlib.nullcontext(), self._ending_on_fault():
                if isinstance(job, do.Wait):
                    waiting += self._await(job)
                    continue
                try:
                    event: Event = Done(job, self._run(job, watch))
                except BaseException as error:  # whatever it is, those who wait have to know
                    waiting.clear()
                    event = self._fault(job, error)
                waiting += self._act(event)

    @contextlib.contextmanager
    def _ending_on_fault(self) -> Iterator[None]:
        """A context in which an action that cannot be carried out ends the run, and not the thread alone."""
        try:
            yield
        except BaseException as error:
            with self._requests.changed:
                if self._membership.error is None:
                    self._membership.error = RuntimeError(f"the groups cannot be looked after: {error!r}")
                self._requests.end(self._membership.error)
                self._requests.changed.notify_all()
            self._pool.release()
            raise

    def _await(self, wait: do.Wait) -> list[do.Job]:
        """Returns the jobs that follow; nothing happens between the end of the wait and these."""
        limits: dict[type, float] = {do.AwaitSaves: _SAVE_SECONDS, do.AwaitDeath: _DEATH_SECONDS}
        limit, start = limits.get(type(wait)), time.monotonic()
        with self._requests.changed:
            while not self._membership.is_over(wait) and (limit is None or time.monotonic() < start + limit):
                self._requests.changed.wait(None if limit is None else _POLL_SECONDS)
            return self._act(Done(wait))

    def _run(self, job: do.Job, watch: Stopwatch) -> Any:
        """Returns the result of a job that is no wait."""
        pool, loads = self._pool, self._requests.loads
        match job:
            case do.Detach(reason):
                self._groups.detach(reason)
            case do.Kill(groups):
                pool.kill(groups)
            case do.Reset(but):
                pool.reset(but, list(loads))
            case do.Start(groups):
                pool.start(groups)
            case do.Open(groups):
                pool.open(groups, self._note_loss)
            case do.AwaitReset():
                pool.await_reset()
            case do.CheckCopies(snapshot):
                pool.copies.check(snapshot)
            case do.Connect():
                pool.connect()
            case do.Load(groups):
                pool.load(groups, loads)
            case do.Restore(snapshot):
                pool.copies.restore(snapshot, pool.infos)
            case do.ConnectDriver():
                return pool.connect_driver()
            case do.Report(recovered):
                self._report(recovered, watch)
            case do.StartSpares():
                pool.replacements.start_spares()
            case do.Look():
                return self._migrations.groups_to_move()
            case do.Prepare(mpmd_idx, kind):
                self._groups.ask_health()
                return self._migrations.prepare(mpmd_idx, kind)
            case do.FindDead():
                return pool.find_dead()
            case do.Discard():
                pool.replacements.discard()
            case do.CopyAway(attempt, snapshot, base, copied):
                for each in copied:
                    each.result()
                journal = self._membership.journal
                pool.copies.copy_away(snapshot.number, base, lambda: attempt == journal.attempt)
            case do.TakeDigests():
                return take_digests(self._groups, self._requests.logged)
            case do.GoBack(_, snapshot):
                damaged = pool.copies.check(snapshot)
                pool.copies.restore(snapshot, pool.infos)
                return damaged
            case do.Release():
                pool.release()
        return None

    def _fault(self, job: do.Job, error: BaseException) -> Faulted:
        if isinstance(job, do.CopyAway):
            error = raised_by(error)
            return Faulted(job, error, by_death=is_death(error) or isinstance(error, ProcessLostError))
        is_known = isinstance(error, SupersededError | CopiesLostError) or not isinstance(error, Exception)
        if is_known or not isinstance(job, do.ReplacementJob):
            return Faulted(job, error)
        try:
            # Of an error it is not known whose death it is a consequence of.
            dead = {error.mpmd_idx} if isinstance(error, ProcessLostError) else self._pool.find_dead()
            return Faulted(job, error, frozenset(dead), self._node_is_gone(error))
        except Exception as unknown:  # Ray is out of reach
            return Faulted(job, unknown)

    def _node_is_gone(self, error: BaseException) -> bool:
        """Whether a node of the mesh is gone, which explains ``error``."""
        if isinstance(error, NoAllocationError):
            return False
        try:
            self._pool.allocations.check_nodes(range(len(self._pool.actors)))
        except NodeGoneError:  # the processes that were there will get other allocations
            return True
        return False

    def _note_loss(self, error: ProcessLostError) -> None:
        """Handles a death while new processes take their devices. Runs in the thread of ``Open``."""
        for job in self._act(Lost(error.mpmd_idx, error, self._node_is_gone(error))):
            self._run(job, Stopwatch())
        self._pool.check_open()

    def _report(self, recovered: do.Recovered, watch: Stopwatch) -> None:
        report = RecoveryReport(
            mpmd_idxs=tuple(sorted(recovered.groups)),
            reason=str(recovered.death),
            step=recovered.step.ordinal if recovered.step else None,
            num_replayed=sum(step.failure is None for step in recovered.steps),
            seconds=watch.seconds,
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
        watching = weakref.ref(self), self._wake
        threading.Thread(target=_watch, args=watching, name="mpmd places", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether nothing works any more, or Ray was shut down."""
        return self._membership.error is not None or not self._session.is_connected

    def look_after(self) -> None:
        """Moves the groups that are to move. Is called now and then, by one thread."""
        if not self._membership.dead:
            self._work([do.Look()])

    def wake(self) -> None:
        """Has the groups that are to move looked for soon."""
        self._wake.set()

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
            self._wake.set()
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
        return not self._late and not self._membership.moves.is_paused

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


def _watch(shell: weakref.ref[Shell], wake: threading.Event) -> None:
    """Looks after a shell now and then, in a thread that does not keep the shell alive."""
    while True:
        wake.wait(_LOOK_SECONDS)
        wake.clear()
        alive = shell()
        if alive is None or alive.has_ended:
            return
        alive.look_after()
        del alive
