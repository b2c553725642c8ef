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
from cluster.recovery.journal import BEGINNING, Journal, Outcome, ResultChangedError
from cluster.recovery.left_out import LeftOut
from cluster.recovery.logged import LoggedStep
from cluster.recovery.moves import Moves
from cluster.recovery.policy import FROM_DISK, FailureCounter, Recovery, copying_fault, loss_of_values
from cluster.recovery.replacement import Replacement
from cluster.recovery.report import CORRUPTED, DIED, FAILED
from cluster.recovery.rewinds import Ending, GoingBackError, Rewinds
from mpmd.errors import GroupDiedError, RecoveryError


class Membership:
    """The state machine. Not thread-safe.

    Args:
      policy: when to copy values, and when to give up.
      processes_per_group: their number.
      left_out: the groups that are neither logged nor copied.

    Attributes:
      journal: what groups were asked.
      left_out: those groups.
      moves: of groups to other places.
      dead: the groups that are being replaced, or because of which all go back, and why.
      error: why nothing works any more.
      last_checkpoint: as of ``mpmd.runtime.protocol.Runtime``.
    """

    def __init__(self, policy: Recovery, processes_per_group: Sequence[int], left_out: Collection[int] = ()):
        self.journal = Journal()
        self.left_out = LeftOut(frozenset(left_out))
        self.dead: dict[int, GroupDiedError] = {}
        self.moves = Moves(self.journal, self.dead, self.left_out)
        self.error: RuntimeError | None = None
        self.last_checkpoint: str | None = None
        self._policy = policy
        self._processes_per_group = tuple(processes_per_group)
        self._failures = FailureCounter(policy.max_failures)
        self._replacement: Replacement | None = None
        self._marked = BEGINNING  # the snapshot of the last ``MarkCommitted``
        self._rewinds = Rewinds(
            self.journal,
            self.dead,
            self.moves,
            policy,
            self.left_out,
            len(processes_per_group),
        )

    # What others may do now.

    @property
    def is_running(self) -> bool:
        """Whether groups may be asked: none is being replaced or about to move, and none is to go back."""
        return not self.dead and not self.moves.is_paused and not self._rewinds.is_under_way

    @property
    def times_back(self) -> int:
        """The number of times that groups have gone back so far, or were about to."""
        return self.journal.attempt + self._rewinds.count

    @property
    def may_go_back(self) -> bool:
        """Whether groups may go back with nobody dead: they are running, and no checkpoint is being saved."""
        return self.is_running and not self._rewinds.awaits_checkpoint

    @property
    def check_is_due(self) -> bool:
        """Whether to have groups repeat their steps now, after a step. A checkpoint keeps them from it."""
        return self.is_running and self._rewinds.is_due

    @property
    def snapshot_is_due(self) -> bool:
        """Whether to begin a snapshot, after a step."""
        return self._policy.snapshot_is_due(self.journal)

    @property
    def snapshot_is_late(self) -> bool:
        """Whether the next step has to wait for the snapshot under way."""
        return self._policy.is_late(self.journal)

    def is_over(self, wait: do.Wait) -> bool:
        """Whether the awaited event has come, or cannot come any more."""
        journal = self.journal
        if self.error is not None:
            return True
        match wait:
            case do.AwaitAnswers() | do.AwaitRepeated():
                return self._rewinds.is_over(wait)
            case do.AwaitReplay(recovered):
                return recovered.attempt != journal.attempt or all(map(journal.is_answered, recovered.steps))
            case do.AwaitLeftOut():
                return not self.left_out.pending
            case do.AwaitRunning():
                return self.is_running
            case do.AwaitSaves():
                return not self.moves.unwritten
            case do.AwaitSnapshot():  # a checkpoint that is being saved, which it waits for, may take long
                return self.moves.is_superseded or journal.snapshot is None or journal.keeps_copies
            case do.AwaitDeath((copying, _)):
                return copying.attempt != journal.attempt
        raise AssertionError(f"{wait} is no wait of membership")

    def is_void(self, job: do.Job) -> bool:
        """Whether a job need not be carried out any more."""
        return self.error is not None and not isinstance(job, do.Report | do.Release)

    # Events.

    def handle(self, event: on.Event) -> Actions:
        """The consequences of an event, in order."""
        if self.error is not None:
            return _clean_up(event)
        try:
            return self._handle(event)
        except RecoveryError as unrecoverable:
            return self._end(unrecoverable, unrecoverable.__cause__)
        except ResultChangedError as changed:
            return self._end(RecoveryError(f"{changed}. {FROM_DISK}", changed.mpmd_idx), changed.__cause__)

    def _handle(self, event: on.Event) -> Actions:
        journal = self.journal
        match event:
            case on.Died(error):
                return self._note_death(error)
            case on.Answered(_, request, mpmd_idx, result, error) if not request.is_logged:
                return [do.Tell(self.left_out.answer(request, mpmd_idx, result, error))]
            case on.Answered(attempt, request, mpmd_idx, result, None):
                return self._believe(journal.succeed(attempt, request, mpmd_idx, result))
            case on.Answered(_, _, _, _, GroupDiedError()):
                return []  # the death itself is noted, and then all is asked again
            case on.Answered(attempt, request, mpmd_idx, _, BaseException() as error):
                return self._believe(journal.fail(attempt, request, mpmd_idx, error))
            case on.RewindAsked(number, refused):
                assert self.is_running, "groups go back when they are asked nothing"
                return self._rewinds.begin(number, refused)
            case on.Repeated():
                return self._rewinds.note(event)
            case on.Unneeded(copies):
                return self._believe(journal.drop_copies(copies))
            case on.Copying(snapshot, copied):
                return [do.CopyAway(journal.attempt, snapshot, journal.committed, copied)]
            case on.Lost():
                return self._current.start_beside(event)
            case on.Done(do.RewindJob() as job, result):
                return self._follow(self._rewinds.go_on(job, result))
            case on.Faulted(do.RewindJob() as job, error):
                return self._follow(self._rewinds.fail(job, error))
            case on.Done(job, result):
                return self._go_on(job, result)
            case on.Faulted(do.CopyAway() as copying, error):
                return self._give_snapshot_up(copying, error, event.by_death)
            case on.Faulted(do.FindDead((_, error))):
                return self._end(copying_fault(journal, error), error)
            case on.Faulted(do.Report(recovered), error):
                message = f"a recovery cannot be reported: {type(error).__name__}: {error}"
                return [do.Say(message), *_after_report(recovered)]
            case on.Faulted(job, error):
                if isinstance(job, do.ReplacementJob):
                    return self._current.begin_again(event)
                return self.moves.fail(job, error)
            case on.Closed(error):
                self.error = error
                return [do.End(error)]
        raise AssertionError(f"{event} is no event of membership")

    def _go_on(self, job: do.Job, result: Any) -> Actions:
        match job:
            case do.Detach():
                return self._replace()
            case do.Start():
                return self._current.open()
            case do.Open(groups):
                return self._current.open(groups)
            case do.ConnectDriver():
                return self._replay(result)
            case do.AwaitReplay(recovered):
                return [do.Report(recovered)]
            case do.Report(recovered):
                return _after_report(recovered)
            case do.StartSpares(ends_move=True):
                return self.moves.end()
            case do.Look():
                return self.moves.begin(result)
            case do.Prepare():
                return self.moves.prepared(bool(result))
            case do.AwaitRunning():
                return self.moves.pause()
            case do.FindDead(None):
                return self.moves.check(result)
            case do.AwaitSnapshot():
                return self._move()
            case do.CopyAway(attempt, snapshot):
                return self._believe(self.journal.mark_copied(attempt, snapshot))
            case do.FindDead((copying, error) as failed):
                has_died = set(result) - self.left_out.dead.keys()
                return [do.AwaitDeath(failed)] if has_died else self._end_without(copying, error)
            case do.AwaitDeath((copying, error)):
                return self._end_without(copying, error)
        return []

    def _end(self, error: RuntimeError, cause: BaseException | None) -> Actions:
        """Fails all that is asked, now and later, and ends the processes."""
        error.__cause__ = cause
        self.error = error
        return [do.End(error), do.Release()]

    # What groups answer.

    def _believe(self, outcomes: Sequence[Outcome]) -> Actions:
        """Marks a new commit, has groups go back for a failed step, and tells the user the outcomes."""
        actions: Actions = []
        if self._marked != self.journal.committed:
            self._marked = self.journal.committed
            actions.append(do.MarkCommitted())
        if (step := self.journal.failed) is not None and not self.dead:
            reason = f"{step} failed, and all groups go back to before it"
            actions += self._go_back_for(GoingBackError(reason, min(step.groups)), step, FAILED)
        return [*actions, do.Tell(outcomes)]

    # Snapshots.

    def _give_snapshot_up(self, copying: do.CopyAway, error: BaseException, by_death: bool) -> Actions:
        """Goes on without a snapshot if the log may still grow; else looks for a death that explains it."""
        if copying.attempt != self.journal.attempt:
            return []
        if not self._policy.may_go_on(self.journal):
            return [do.FindDead((copying, error))]
        self.journal.fail_snapshot(copying.snapshot)
        giving_back = do.GiveBack(copying.snapshot)
        if by_death:  # which is told by itself
            return [giving_back]
        message = (
            f"the groups' values could not be copied, which is tried again after {self._policy.every} steps; "
            f"until then a death goes back to the copies before: {type(error).__name__}: {error}"
        )
        return [giving_back, do.Say(message)]

    def _end_without(self, copying: do.CopyAway, error: BaseException) -> Actions:
        """Ends the run for lack of a snapshot, unless a death explains it."""
        if copying.attempt != self.journal.attempt:
            return []
        return self._end(copying_fault(self.journal, error), error)

    # Groups that are replaced, and groups that go back.

    def _note_death(self, error: GroupDiedError) -> Actions:
        before = self.dead.get(error.mpmd_idx)
        if before is None and error.mpmd_idx in self.left_out.groups:
            self.left_out.dead.setdefault(error.mpmd_idx, error)
            return []
        if before is not None and not isinstance(before, GoingBackError):
            return []
        return self._go_back_for(error, self.journal.current_step(error.mpmd_idx), DIED)

    def _go_back_for(self, error: GroupDiedError, step: LoggedStep | None, kind: str) -> Actions:
        """Has all groups go back because of ``error``; a replacement under way also handles this death."""
        is_first = not self.dead
        self.dead[error.mpmd_idx] = error
        if not is_first:
            return []
        self.journal.suspend()
        return [*self._rewinds.drop(), *self._begin_replacement(error, step, kind)]

    def _begin_replacement(self, error: GroupDiedError, step: LoggedStep | None, kind: str) -> Actions:
        self._replacement = Replacement(error, step, kind, self._processes_per_group, self._failures)
        return [do.AwaitLeftOut(), do.Detach(error)] if self.left_out.groups else [do.Detach(error)]

    def _follow(self, ending: Ending) -> Actions:
        """The consequences of the end of a job of a rewind."""
        if ending.error is not None:
            return [*ending.actions, *self._end(ending.error, None)]
        if ending.death is not None:
            return [*ending.actions, *self._begin_replacement(ending.death, None, ending.kind)]
        return ending.actions

    @property
    def _current(self) -> Replacement:
        assert self._replacement is not None, "no group is being replaced"
        return self._replacement

    def _replace(self) -> Actions:
        """Begins to replace all dead groups; no call is under way that could report a further death."""
        dead = {i for i, error in self.dead.items() if not isinstance(error, GoingBackError)}
        is_failure = bool(dead - self.moves.leaving)
        self.dead.update(self.left_out.dead)
        dead |= self.left_out.dead.keys()
        self.moves.leaving -= dead
        return self._current.begin(dead, is_failure, self.journal.committed)

    def _replay(self, connections: Sequence) -> Actions:
        """Attaches the new connections, and repeats the requests in the journal."""
        replacement, self._replacement = self._current, None
        self.dead.clear()
        actions: Actions = [do.Attach(connections)]
        if begun := self.left_out.begin_anew(replacement.replaced):
            actions.append(do.ForgetValues(begun))
        if replacement.lost is not None:
            loss = loss_of_values(replacement.death, replacement.lost, self.last_checkpoint)
            self._marked = BEGINNING
            actions += [do.LoseValues(loss), do.Tell(self.journal.lose_values(loss))]
        entries = self.journal.go_back()
        recovered = do.Recovered(
            frozenset(replacement.replaced),
            replacement.death,
            replacement.step,
            replacement.kind,
            replacement.lost,
            self.journal.attempt,
            tuple(entry for entry in entries if isinstance(entry, LoggedStep)),
        )
        return [*actions, do.Replay(entries), do.AwaitReplay(recovered)]

    def _move(self) -> Actions:
        """A group moves like one that has died, when all values are copied."""
        if (copying := self.moves.copy()) is not None:
            return copying
        death, kind = self.moves.leave()
        return self._go_back_for(death, None, kind)


def _after_report(recovered: do.Recovered) -> Actions:
    return [do.StartSpares(ends_move=recovered.kind not in (DIED, FAILED, CORRUPTED))]


def _clean_up(event: on.Event) -> Actions:
    """The run has ended: releases processes and connections that a job has started since."""
    match event:
        case on.Done(do.AwaitReplay(recovered)):
            return [do.Report(recovered)]
        case on.Done(do.ConnectDriver(), connections):
            return [do.Disconnect(connections)]
        case on.Done(job) | on.Faulted(job):
            is_starting = isinstance(job, do.Start | do.Open | do.StartSpares | do.Look | do.Prepare)
            return [do.Release()] if is_starting else []
    return []
