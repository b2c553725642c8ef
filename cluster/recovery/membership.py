"""The control of membership: who is alive, who replaces whom, who moves where, what groups repeat.

A state machine: events go in and actions come out. It knows neither Ray nor a thread nor the clock; the
``Shell`` carries out the actions. ``docs/architecture/membership.md`` has the states and the invariants.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from cluster.recovery import actions as do
from cluster.recovery import events as on
from cluster.recovery.actions import Actions, Rewound
from cluster.recovery.events import State
from cluster.recovery.journal import Journal, Outcome, ResultChangedError
from cluster.recovery.keepers import CopiesLostError
from cluster.recovery.left_out import LeftOut
from cluster.recovery.logged import Asked, LoggedStep
from cluster.recovery.moves import Moves
from cluster.recovery.policy import (
    FROM_DISK,
    REPLACE,
    UNLOCATED_REMEDY,
    WARN,
    FailureCounter,
    Recovery,
    copying_fault,
    loss_of_values,
)
from cluster.recovery.replacement import Replacement
from cluster.recovery.report import COMPUTED, CORRUPTED, DIED, FAILED, MOVES, CorruptionReport, Phases
from cluster.recovery.rewinds import Rewinds
from cluster.recovery.snapshots import Snapshots
from mpmd.errors import GroupDiedError, RecoveryError, SilentCorruptionError


class Membership:
    """The state machine. Not thread-safe.

    Args:
      policy: when to copy values, and when to give up.
      processes_per_group: their number.
      left_out: the groups that are neither logged nor copied.

    Attributes:
      logged: the groups that are not left out.
      dead: the groups that are being replaced, and why.
      error: why nothing works any more.
      last_checkpoint: as of ``mpmd.runtime.protocol.Runtime``.
    """

    def __init__(self, policy: Recovery, processes_per_group: Sequence[int], left_out: Collection[int] = ()):
        self.state = State.RUNNING
        self.journal = Journal()
        self.left_out = LeftOut(frozenset(left_out))
        self.moves = Moves(self.journal, self.left_out)
        self.rewinds = Rewinds(self.journal, policy)
        self.dead: dict[int, GroupDiedError] = {}
        self.error: RuntimeError | None = None
        self.last_checkpoint: str | None = None
        self._policy = policy
        self._processes_per_group = tuple(processes_per_group)
        self.logged = frozenset(range(len(processes_per_group))) - self.left_out.groups
        self._first = min(self.logged, default=0)  # the group that an error names which concerns all groups
        self._failures = FailureCounter(policy.max_failures)
        self._replacement: Replacement | None = None
        self._replayed: Replacement | None = None  # to report, when its steps are answered
        self._unanswered: set[tuple[Asked, int]] = set()  # since before the groups were to be quiet
        self._snapshots = Snapshots(self.journal, policy)

    # What others may do now.

    @property
    def is_running(self) -> bool:
        """Whether a request is sent to groups now; other requests wait, or are logged and sent afterwards."""
        return self.state is State.RUNNING

    @property
    def snapshot_is_late(self) -> bool:
        return self._policy.is_late(self.journal)

    @property
    def times_back(self) -> int:
        """The number of times that groups have gone back so far, or were about to."""
        return self.journal.attempt + self.rewinds.count

    @property
    def may_go_back(self) -> bool:
        """Whether groups may go back with nobody dead: they are running, and no checkpoint is being saved."""
        return self.is_running and not self._awaits_checkpoint

    @property
    def _awaits_checkpoint(self) -> bool:
        return self.journal.keeps_copies or bool(self.moves.unwritten)

    def awaits(self, job: do.AwaitDeath | do.AwaitCheckpoints) -> bool:
        """Whether the event may still come for which a job waits."""
        if self.state is State.ENDED:
            return False
        if isinstance(job, do.AwaitDeath):
            return job.copying.attempt == self.journal.attempt
        return self.moves.is_ready and self.moves.is_blocked

    def is_void(self, job: do.Job) -> bool:
        """Whether a job need not be carried out any more."""
        return self.state is State.ENDED and not isinstance(job, do.ReportRecovery | do.ReleaseAll)

    def handle(self, event: on.Event) -> Actions:
        """The consequences of an event, in order. When they are carried out, ``advance`` has the next."""
        if self.state is State.ENDED:
            return self._clean_up(event)
        try:
            return self._handle(event)
        except RecoveryError as unrecoverable:
            return self._end(unrecoverable, unrecoverable.__cause__)
        except ResultChangedError as changed:
            return self._end(RecoveryError(f"{changed}. {FROM_DISK}", changed.mpmd_idx), changed.__cause__)

    def _clean_up(self, event: on.Event) -> Actions:
        """Releases the processes and connections that a job may have started since the run has ended."""
        match event:
            case on.Done(do.Recover(), result):
                return [do.Disconnect(result.connections), do.ReleaseAll()]
            case on.Done(job) | on.Faulted(job) if self.is_void(job):
                return [do.ReleaseAll()]
        return []

    def _handle(self, event: on.Event) -> Actions:
        journal = self.journal
        match event:
            case on.Died(error):
                return self._note_death(error)
            case on.Answered(_, outcome) if not outcome.request.is_logged:
                return [do.Tell(self.left_out.answer(outcome))]
            case on.Answered(attempt, outcome):
                if isinstance(outcome.error, GroupDiedError):
                    return []  # the death itself is noted, and then all is asked again
                self._unanswered.discard((outcome.request, outcome.mpmd_idx))
                return self._believe(journal.answer(attempt, outcome))
            case on.StepAsked():
                if self.rewinds.is_due and not self._awaits_checkpoint:
                    if self.rewinds.asked is None:
                        self.rewinds.ask(on.RewindAsked())
                elif self._policy.snapshot_is_due(journal):
                    return [do.BeginSnapshot()]
            case on.RewindAsked():
                assert self.rewinds.asked is None, "groups go back for one reason at a time"
                self.rewinds.ask(event)
            case on.Copying(snapshot, copied):
                return self._snapshots.copy(snapshot, copied)
            case on.CopyAsked(copy):
                self.moves.unwritten.add(copy)
            case on.Unneeded(copies):
                return self._believe(journal.drop_copies(copies))
            case on.Freed(copy):
                self.moves.unwritten.discard(copy)
            case on.Sent(request):
                self.left_out.pending.add(request)
            case on.Wanted(groups, given_up):
                wanted = self.left_out.wanted
                (wanted.difference_update if given_up else wanted.update)(groups)
            case on.Closed(error):
                return self._end(error, error.__cause__, releases=False)
            case on.Done(job, result):
                return self._go_on(job, result)
            case on.Faulted(job, error):
                return self._fail(job, error, event.by_death)
        return []

    def _go_on(self, job: do.Job, result: Any) -> Actions:
        match job:
            case do.Detach():
                return self._replace()
            case do.Recover():
                self._current.replaced |= result.beside
                return self._replay([do.Attach(result.connections)])
            case do.GoBack():
                return self._recover_from_death(DIED) if self.dead else self._replay([])
            case do.Rewind():
                return self._end_rewind(job, result)
            case do.ReportRecovery(report):
                return [do.StartSpares(report.kind in MOVES)]
            case do.StartSpares(ends_move=True):
                return self.moves.end()
            case do.Look():
                return self.moves.begin(result)
            case do.Prepare():
                return self.moves.prepare(result)
            case do.CopyAway(attempt, snapshot):
                self._snapshots.end_copying()
                return self._believe(self.journal.mark_copied(attempt, snapshot))
            case do.AwaitDeath(_, error):  # no death was heard of
                return self._end(copying_fault(self.journal, error), error) if self.awaits(job) else []
            case do.AwaitCheckpoints():
                return self.moves.expire() if self.awaits(job) else []
        return []

    def _fail(self, job: do.Job, error: BaseException, by_death: bool) -> Actions:
        match job:
            case do.Detach() | do.Recover():
                return [self._current.begin_again(error)]
            case do.GoBack():
                return self._recover_from_death(FAILED, error)
            case do.Rewind():
                return self._interrupt_rewind(error)
            case do.CopyAway():
                self._snapshots.end_copying()
                return self._snapshots.fail(job, error, by_death)
            case do.AwaitDeath():
                return self._go_on(job, None)
            case do.ReportRecovery():
                message = f"a recovery cannot be reported: {type(error).__name__}: {error}"
                return [do.Say(message), *self._go_on(job, None)]
        return self.moves.fail(job, error)

    def _end(self, error: RuntimeError, cause: BaseException | None, releases: bool = True) -> Actions:
        error.__cause__ = cause
        self.error, self.state = error, State.ENDED
        report = [] if self._replayed is None else [self._replayed.report()]
        return [do.End(error), *report, *([do.ReleaseAll()] if releases else [])]

    def advance(self) -> Actions:
        """The consequences of the present state, when all actions before are carried out. Empty: none."""
        if self.state is State.ENDED:
            return []
        if self._replayed is not None and self._is_replayed(self._replayed):
            replayed, self._replayed = self._replayed, None
            return [replayed.report()]
        if self.state is State.RUNNING:
            if self.moves.is_ready and (actions := self.moves.give_up()):
                return actions
            if self.rewinds.asked is not None or self.moves.is_ready:
                self._quiesce()
        is_quiet = self.state is State.QUIESCING and not self._unanswered and not self._snapshots.is_copying
        if is_quiet and (actions := self._begin()):
            return actions
        replacement = self._replacement
        if replacement is None or replacement.is_detached or self.left_out.pending:
            return []
        replacement.is_detached = True
        return [do.Detach(replacement.death)]

    def _quiesce(self) -> None:
        """From now on requests wait, until groups have answered all requests before."""
        self.state = State.QUIESCING
        self._unanswered = {(request, i) for request in self.journal.unasked for i in request.waiting}

    def _is_replayed(self, replacement: Replacement) -> bool:
        """Whether all steps of the replay are answered, or groups go back once more."""
        has_ended = replacement.attempt != self.journal.attempt
        return has_ended or not any(step.waiting for step in replacement.replayed)

    def _begin(self) -> Actions:
        """Begins what groups were to be quiet for: they have answered all that is logged."""
        journal = self.journal
        if (step := journal.failed) is not None:
            reason = GroupDiedError(f"{step} failed, and all groups go back to before it", min(step.groups))
            return [] if self.left_out.pending else self._go_back(reason, step)
        if journal.unasked:  # since groups were to be quiet: they are asked in the order of the log
            return self._resume()
        if self.rewinds.asked is not None:
            if self._awaits_checkpoint or self.left_out.pending:
                return []
            if (job := self.rewinds.begin()) is None:
                return [*self.rewinds.settle(), *self._resume()]
            self.state = State.RECOVERING
            return [job]
        if self.moves.is_blocked:
            return []
        # If a checkpoint takes long, which no snapshot overtakes, or the snapshot fails, steps are run again.
        if journal.snapshot is None and journal.steps_since_snapshot and not journal.keeps_copies:
            return [do.BeginSnapshot()]
        death, kind, phases = self.moves.leave()
        self.dead[death.mpmd_idx] = death
        return self._recover(death, None, kind, phases)

    def _resume(self) -> Actions:
        """Groups run again, and are asked for the requests that have waited."""
        self.state = State.RUNNING
        return [do.ReplayLog(self.journal.unasked)]

    def _believe(self, outcomes: Sequence[Outcome]) -> Actions:
        """Marks a new commit, has groups go back for a failed step, and tells the user the outcomes."""
        actions = self._snapshots.mark_committed()
        if self.journal.failed is not None and self.state is not State.RECOVERING:
            if self.state is State.RUNNING:
                self._quiesce()
            self.journal.suspend()
            actions += self.rewinds.interrupt()
        return [*actions, do.Tell(outcomes)]

    # Groups that are replaced, and groups that go back.

    def _note_death(self, error: GroupDiedError) -> Actions:
        mpmd_idx = error.mpmd_idx
        if mpmd_idx in self.left_out.groups and mpmd_idx not in self.dead:
            self.left_out.dead.setdefault(mpmd_idx, error)
            return []
        if mpmd_idx in self.dead:
            return []
        self.dead[mpmd_idx] = error
        if self.state is State.RECOVERING:  # the end of the job under way takes the death into account
            return []
        return self._recover(error, self.journal.current_step(mpmd_idx), DIED)

    def _recover_from_death(self, kind: str, error: BaseException | None = None) -> Actions:
        """Has all groups connect again and go back, for deaths that are noted, or else for an error."""
        if isinstance(error, GroupDiedError) and error.mpmd_idx not in self.left_out.groups:
            self.dead.setdefault(error.mpmd_idx, error)  # ``Died`` is told a moment later
        if self.dead:
            return self._recover(min(self.dead.items())[1], None, kind if error is None else DIED)
        reason = f"all groups went back, and one could not: {error}"
        return self._recover(GroupDiedError(reason, self._first), self.journal.failed, kind)

    def _recover(
        self, death: GroupDiedError, step: LoggedStep | None, kind: str, phases: Phases | None = None
    ) -> Actions:
        self.journal.suspend()
        self._unanswered = set()
        self._begin_replacement(death, step, kind, phases)
        return self.rewinds.interrupt()

    def _go_back(self, reason: GroupDiedError, step: LoggedStep | None) -> Actions:
        """Has all groups, which have answered all, go back with nobody dead."""
        replacement = self._begin_replacement(reason, step, FAILED)
        replacement.is_detached = True  # calls go on
        return [do.GoBack(self.journal.committed, replacement.phases)]

    def _begin_replacement(
        self, death: GroupDiedError, step: LoggedStep | None, kind: str, phases: Phases | None = None
    ) -> Replacement:
        processes, self.state = self._processes_per_group, State.RECOVERING
        begun = Replacement(death, step, kind, processes, self._failures, phases or Phases())
        self._replacement = begun
        return begun

    def _end_rewind(self, job: do.Rewind, rewound: Rewound) -> Actions:
        """Groups have repeated their steps: compares the runs, and reacts to wrong bits."""
        if self.dead:
            return [*self.rewinds.interrupt(rewound), *self._recover_from_death(DIED)]
        if rewound.late is not None:
            reason = f"all groups go back without a comparison of their steps: {rewound.late}"
            ending = self.rewinds.interrupt(rewound)
            return [*ending, *self._go_back(GroupDiedError(reason, self._first), None)]
        reports, found = self.rewinds.compare(job, rewound)
        reaction = self._policy.on_corruption
        if found is None or reaction == WARN:
            return [*reports, *self._settle_rewind(rewound)]
        if reaction == REPLACE and found.kind == COMPUTED:
            for i in found.mpmd_idxs:
                self.dead[i] = GroupDiedError(f"group {i} has computed or kept wrong bits", i)
            ending = self.rewinds.interrupt(rewound)
            return [*reports, *ending, *self._recover_from_death(CORRUPTED)]
        remedy = UNLOCATED_REMEDY if reaction == REPLACE else ""
        return [*reports, *self._end(SilentCorruptionError(f"{found}{remedy}", found.mpmd_idxs), None)]

    def _settle_rewind(self, rewound: Rewound) -> Actions:
        """A snapshot that was due with the step before the check is begun after it."""
        snapshot: Actions = [do.BeginSnapshot()] if self._policy.snapshot_is_due(self.journal) else []
        return [*self.rewinds.settle(rewound), *self._resume(), *snapshot]

    def _interrupt_rewind(self, error: BaseException) -> Actions:
        if isinstance(error, ResultChangedError):
            raise error
        if isinstance(error, CopiesLostError) and not self.dead:  # no group has gone back
            lost = do.ReportCorruption(CorruptionReport.of_copies(str(error)))
            return [lost, *self._settle_rewind(Rewound())]
        return self._recover_from_death(FAILED, error)

    @property
    def _current(self) -> Replacement:
        assert self._replacement is not None, "no group is being replaced"
        return self._replacement

    def _replace(self) -> Actions:
        """Begins to replace all dead groups; no call is under way that could report a further death."""
        dead = set(self.dead)
        is_failure = bool(dead - self.moves.leaving)
        self.dead.update(self.left_out.dead)
        dead |= self.left_out.dead.keys()
        self.moves.leaving -= dead
        return [self._current.begin(dead, is_failure, self.journal.committed)]

    def _replay(self, actions: Actions) -> Actions:
        """All groups have gone back: repeats the requests in the journal."""
        replacement, self._replacement = self._current, None
        self.state = State.RUNNING
        self.dead.clear()
        if replacement.replaced and (losses := self.left_out.begin_anew(replacement.replaced)):
            actions.append(do.LoseValues(losses))
        if replacement.lost is not None:
            loss = loss_of_values(replacement.death, replacement.lost, self.last_checkpoint)
            lost = do.LoseValues(dict.fromkeys(self.logged, loss))
            actions += [lost, do.Tell(self.journal.lose_values(loss))]
        entries = self.journal.go_back()
        replacement.begin_replay(self.journal.attempt, entries)
        self._replayed = replacement
        return [*actions, do.ReplayLog(entries)]
