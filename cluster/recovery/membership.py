"""The control of membership: who is alive, who replaces whom, who moves where, what groups repeat.

A state machine: events go in and actions come out. It knows neither Ray nor a thread nor the clock; the
``Shell`` carries out the actions. ``docs/architecture/membership.md`` has the states and the invariants.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from cluster.recovery import actions as do
from cluster.recovery import events as on
from cluster.recovery.actions import Actions
from cluster.recovery.journal import Journal, Outcome, ResultChangedError
from cluster.recovery.keepers import CopiesLostError
from cluster.recovery.left_out import LeftOut
from cluster.recovery.logged import Asked, LoggedStep
from cluster.recovery.moves import Moves
from cluster.recovery.policy import FROM_DISK, FailureCounter, Recovery, loss_of_values
from cluster.recovery.replacement import Replacement
from cluster.recovery.report import CORRUPTED, DIED, FAILED, CorruptionReport, Phases
from cluster.recovery.rewinds import Rewinds, Rewound
from cluster.recovery.snapshots import SnapshotFailedError, Snapshots
from cluster.recovery.states import State, clean_up
from mpmd.errors import GroupDiedError, RecoveryError


class Membership:
    """The state machine. Not thread-safe.

    Args:
      policy: when to copy values, and when to give up.
      processes_per_group: their number.
      left_out: the groups that are neither logged nor copied.

    Attributes:
      state: of all groups.
      journal: what groups were asked.
      left_out: those groups.
      moves: of groups to other places.
      rewinds: of groups with nobody dead.
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
        groups = set(range(len(processes_per_group))) - self.left_out.groups
        self._first = min(groups, default=0)  # the group that an error names which concerns all groups
        self._failures = FailureCounter(policy.max_failures)
        self._replacement: Replacement | None = None
        self._replayed: do.Recovered | None = None  # to report, when its steps are answered
        self._unanswered: set[tuple[Asked, int]] = set()  # since before the groups were to be quiet
        self._snapshots = Snapshots(self.journal, policy)

    # What others may do now.

    @property
    def is_running(self) -> bool:
        """Whether a request is sent to groups now; other requests wait, or are logged and sent afterwards."""
        return self.state is State.RUNNING

    @property
    def snapshot_is_due(self) -> bool:
        """Whether to begin a snapshot, after a step."""
        return not self._check_is_due and self._policy.snapshot_is_due(self.journal)

    @property
    def _check_is_due(self) -> bool:
        return self.rewinds.is_due and not self._awaits_checkpoint

    @property
    def snapshot_is_late(self) -> bool:
        """Whether the next step has to wait for the snapshot under way."""
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

    def awaits(self, timer: do.Timer) -> bool:
        """Whether the event may still come for which a timer sets the time."""
        if self.state is State.ENDED:
            return False
        if timer.failed is not None:
            return timer.failed.copying.attempt == self.journal.attempt
        return self.moves.is_ready and self.moves.is_blocked

    def is_void(self, job: do.Job) -> bool:
        """Whether a job need not be carried out any more."""
        return self.state is State.ENDED and not isinstance(job, do.Report | do.Release)

    def handle(self, event: on.Event) -> Actions:
        """The consequences of an event, in order. When they are carried out, ``advance`` has the next."""
        if self.state is State.ENDED:
            return clean_up(event)
        try:
            return self._handle(event)
        except RecoveryError as unrecoverable:
            return self._end(unrecoverable, unrecoverable.__cause__)
        except SnapshotFailedError as failed:
            return self._end(failed.error, failed.error.__cause__)
        except ResultChangedError as changed:
            return self._end(RecoveryError(f"{changed}. {FROM_DISK}", changed.mpmd_idx), changed.__cause__)

    def _handle(self, event: on.Event) -> Actions:
        journal = self.journal
        match event:
            case on.Died(error):
                return self._note_death(error)
            case on.Answered(_, request, mpmd_idx, result, error) if not request.is_logged:
                return [do.Tell(self.left_out.answer(request, mpmd_idx, result, error))]
            case on.Answered(attempt, request, mpmd_idx, result, error):
                if isinstance(error, GroupDiedError):
                    return []  # the death itself is noted, and then all is asked again
                self._unanswered.discard((request, mpmd_idx))
                if error is None:
                    return self._believe(journal.succeed(attempt, request, mpmd_idx, result))
                return self._believe(journal.fail(attempt, request, mpmd_idx, error))
            case on.StepAsked():
                if self._check_is_due and not self.rewinds.is_wanted:
                    self.rewinds.ask()
                elif self.snapshot_is_due:
                    return [do.BeginSnapshot()]
            case on.RewindAsked():
                assert not self.rewinds.is_wanted, "groups go back for one reason at a time"
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
            case do.Report(recovered):
                return [do.StartSpares(recovered.is_move)]
            case do.StartSpares(ends_move=True):
                return self.moves.end()
            case do.Look():
                return self.moves.begin(result)
            case do.Prepare():
                return self.moves.prepare(result)
            case do.CopyAway(attempt, snapshot):
                self._snapshots.end_copying()
                return self._believe(self.journal.mark_copied(attempt, snapshot))
            case do.FindDead():
                return self._snapshots.explain(job, set(result) - self.left_out.dead.keys())
            case do.Timer(failed=do.FindDead() as failed):
                return self._snapshots.end(failed)
            case do.Timer():
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
            case do.FindDead():
                return self._snapshots.end(job)
            case do.Report(recovered):
                message = f"a recovery cannot be reported: {type(error).__name__}: {error}"
                return [do.Say(message), do.StartSpares(recovered.is_move)]
        return self.moves.fail(job, error)

    def _end(self, error: RuntimeError, cause: BaseException | None, releases: bool = True) -> Actions:
        """Fails all that is asked, now and later, and ends the processes."""
        error.__cause__ = cause
        self.error, self.state = error, State.ENDED
        report = [] if self._replayed is None else [do.Report(self._replayed)]
        return [do.End(error), *report, *([do.Release()] if releases else [])]

    def advance(self) -> Actions:
        """The consequences of the present state, when all actions before are carried out. Empty: none."""
        if self.state is State.ENDED:
            return []
        if self._replayed is not None and self._is_replayed(self._replayed):
            recovered, self._replayed = self._replayed, None
            return [do.Report(recovered)]
        if self.state is State.RUNNING:
            if self.moves.is_ready and (actions := self.moves.give_up()):
                return actions
            if self.rewinds.is_wanted or self.moves.is_ready:
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

    def _is_replayed(self, recovered: do.Recovered) -> bool:
        """Whether all steps of a replay are answered, or groups go back once more."""
        return recovered.attempt != self.journal.attempt or all(
            map(self.journal.is_answered, recovered.steps)
        )

    def _begin(self) -> Actions:
        """Begins what groups were to be quiet for: they have answered all that is logged."""
        journal = self.journal
        if (step := journal.failed) is not None:
            reason = GroupDiedError(f"{step} failed, and all groups go back to before it", min(step.groups))
            return [] if self.left_out.pending else self._go_back(reason, step)
        if journal.unasked:  # since groups were to be quiet: they are asked in the order of the log
            return self._resume()
        if self.rewinds.is_wanted:
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
        return [do.Replay(self.journal.unasked)]

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
        verdict = self.rewinds.judge(job, rewound)
        if verdict.error is not None:
            return [*verdict.reports, *self._end(verdict.error, None)]
        if verdict.faulty:
            for mpmd_idx in verdict.faulty:
                reason = f"group {mpmd_idx} has computed or kept wrong bits"
                self.dead[mpmd_idx] = GroupDiedError(reason, mpmd_idx)
            ending = self.rewinds.interrupt(rewound)
            return [*verdict.reports, *ending, *self._recover_from_death(CORRUPTED)]
        return [*verdict.reports, *self._settle_rewind(rewound)]

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
        if replacement.replaced and (begun := self.left_out.begin_anew(replacement.replaced)):
            actions.append(do.ForgetValues(begun))
        if replacement.lost is not None:
            loss = loss_of_values(replacement.death, replacement.lost, self.last_checkpoint)
            self._snapshots.lose()
            actions += [do.LoseValues(loss), do.Tell(self.journal.lose_values(loss))]
        entries = self.journal.go_back()
        self._replayed = replacement.recovered(self.journal.attempt, entries)
        return [*actions, do.Replay(entries)]
