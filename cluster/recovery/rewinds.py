"""Groups that go back with nobody dead: a part of the state machine of ``membership``.

They go back every ``Recovery.verify_every`` steps to notice wrong bits, and when the user searches for the
first NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cluster.recovery import actions as do
from cluster.recovery.actions import Actions
from cluster.recovery.comparison import compare
from cluster.recovery.events import Repeated
from cluster.recovery.journal import Journal
from cluster.recovery.keepers import CopiesLostError
from cluster.recovery.left_out import LeftOut
from cluster.recovery.moves import Moves
from cluster.recovery.policy import REPLACE, WARN, Recovery
from cluster.recovery.report import COMPUTED, CORRUPTED, DIED, FAILED, CorruptionReport
from cluster.recovery.rewind import Rewind
from mpmd.errors import GroupDiedError, SilentCorruptionError, StepTimeoutError
from mpmd.runtime.nonfinite import NonFinitePolicy


class GoingBackError(GroupDiedError):
    """A group is alive, and goes back with all groups, for example because a step has failed on it."""


class Ending(NamedTuple):
    """The consequences of the end of a job of a rewind.

    Attributes:
      death: groups are replaced or go back for it, as ``kind`` says.
      error: the run ends.
    """

    actions: Actions
    death: GroupDiedError | None = None
    kind: str = DIED
    error: RuntimeError | None = None


class Rewinds:
    """Starts, follows and ends rewinds, of which only one is under way at a time.

    Args:
      journal: the requests to groups.
      dead: the groups that are being replaced. While groups go back, one group stands for all of the mesh.
      moves: knows of copies that are still to be written to storage.
      policy: when to have groups repeat their steps, and the reaction to wrong bits.
      left_out: the groups that do not go back, and their requests.
      num_groups: the number of groups of the mesh.

    Attributes:
      count: the number of rewinds so far.
    """

    def __init__(
        self,
        journal: Journal,
        dead: dict[int, GroupDiedError],
        moves: Moves,
        policy: Recovery,
        left_out: LeftOut,
        num_groups: int,
    ):
        self._journal = journal
        self._dead = dead
        self._moves = moves
        self._policy = policy
        self._left_out = left_out
        self._stand_in = min(set(range(num_groups)) - left_out.groups, default=0)
        self.count = 0
        self._rewind: Rewind | None = None
        self._verified = 0  # the steps that were asked before the last check

    @property
    def is_under_way(self) -> bool:
        """Whether a rewind was begun and has not ended: meanwhile groups get no other requests."""
        return self._rewind is not None

    @property
    def is_due(self) -> bool:
        """Whether groups are to repeat their steps now, after a step. A checkpoint keeps them from it."""
        return not self.awaits_checkpoint and self._policy.check_is_due(self._journal, self._verified)

    @property
    def awaits_checkpoint(self) -> bool:
        """Whether a checkpoint is being saved, for which groups are asked more while it is."""
        return self._journal.keeps_copies or bool(self._moves.unwritten)

    def is_over(self, wait: do.AwaitAnswers | do.AwaitRepeated) -> bool:
        """As ``Membership.is_over``."""
        rewind = self._current(wait)
        if rewind is None or self._has_died:
            return True
        if isinstance(wait, do.AwaitRepeated):
            return rewind.has_repeated
        return self._journal.is_quiet and not self._moves.unwritten and not self._left_out.pending

    def begin(self, number: int, refused: NonFinitePolicy | None) -> Actions:
        """Groups are to go back, when they have answered all."""
        self.count += 1
        self._rewind = Rewind(number, refused)
        return [do.AwaitAnswers(number)]

    def note(self, repeated: Repeated) -> Actions:
        """Keeps the answer of a group to a repeated request, for the rewind under way."""
        if self._rewind is not None and self._rewind.number == repeated.number:
            self._rewind.note(repeated)
        return []

    def drop(self) -> Actions:
        """Groups go back for another reason."""
        rewind, self._rewind = self._rewind, None
        if rewind is None:
            return []
        return [do.EndRewind(rewind.number, kept=rewind.kept, is_interrupted=True, late=rewind.late)]

    def _current(self, job: do.RewindJob) -> Rewind | None:
        """The rewind that a job is of; ``None`` if it was dropped."""
        return self._rewind if self._rewind is not None and self._rewind.number == job.number else None

    @property
    def _has_died(self) -> bool:
        """Whether a group is dead, and not only going back."""
        return any(not isinstance(error, GoingBackError) for error in self._dead.values())

    def go_on(self, job: do.RewindJob, result: Any) -> Ending:
        """A job has ended."""
        rewind = self._current(job)
        if rewind is None:
            return Ending([])
        if self._has_died:
            return self._replace()
        if isinstance(job, do.AwaitRepeated) and rewind.late is not None:
            return self._end_late(rewind.late)
        actions: Actions = []
        if not isinstance(job, do.AwaitAnswers):
            actions = rewind.go_on(job, result, self._journal.committed)
        elif actions := rewind.begin(self._journal):
            reason = "all groups go back to repeat their steps"
            self._dead[self._stand_in] = GoingBackError(reason, self._stand_in)
        return self._end(rewind) if rewind.is_over else Ending(actions)

    def fail(self, job: do.RewindJob, error: BaseException) -> Ending:
        """A job has failed. Without copies, groups stay as they are. Otherwise one may have died."""
        rewind = self._current(job)
        if rewind is None:
            return Ending([])
        if isinstance(error, CopiesLostError) and not rewind.has_gone_back and not self._has_died:
            lost = do.ReportCorruption(CorruptionReport.of_copies(str(error)))
            return Ending([lost, *self._resume(rewind)])
        if not self._has_died:
            reason = f"all groups went back to repeat their steps, and one could not: {error}"
            self._dead[self._stand_in] = GoingBackError(reason, self._stand_in)
        return self._replace(DIED if self._has_died else FAILED)

    def _end_late(self, late: StepTimeoutError) -> Ending:
        """A repeated step took too long: ends without a comparison. The next check is due as usual."""
        self._verified = self._journal.num_asked
        reason = f"all groups go back without a comparison of their steps: {late}"
        self._dead[self._stand_in] = GoingBackError(reason, self._stand_in)
        return self._replace(FAILED)

    def _replace(self, kind: str = DIED) -> Ending:
        """Groups are replaced, or go back as if one had died, in place of the rewind."""
        self._journal.suspend()
        if self._has_died:
            for mpmd_idx, error in list(self._dead.items()):
                if isinstance(error, GoingBackError):
                    del self._dead[mpmd_idx]
        return Ending(self.drop(), min(self._dead.items())[1], kind)

    def _resume(self, rewind: Rewind) -> Actions:
        """Ends a rewind: groups have their values from before it, and get the requests that have waited.

        A snapshot that was due with the step before the check is begun after it.
        """
        self._rewind, self._verified = None, self._journal.num_asked
        self._dead.clear()
        ending = do.EndRewind(rewind.number, rewind.found, rewind.kept)
        snapshot = [do.BeginSnapshot()] if self._policy.snapshot_is_due(self._journal) else []
        return [ending, do.Replay(self._journal.unasked), *snapshot]

    def _end(self, rewind: Rewind) -> Ending:
        """Ends a rewind after its steps were repeated: compares the runs, and reacts to wrong bits."""
        if not rewind.is_working:
            self._rewind = None
            return Ending([do.EndRewind(rewind.number)])
        reports: Actions = [
            do.ReportCorruption(CorruptionReport.of_copies(text)) for text in dict.fromkeys(rewind.damaged)
        ]
        found = compare(*rewind.runs)
        if found is None:
            return Ending([*reports, *self._resume(rewind)])
        reports.append(do.ReportCorruption(found))
        rewind.adopt()
        if self._policy.on_corruption == WARN:
            return Ending([*reports, *self._resume(rewind)])
        if self._policy.on_corruption == REPLACE and found.kind == COMPUTED:
            return self._replace_faulty(found, reports)
        remedy = _UNKNOWN if self._policy.on_corruption == REPLACE else ""
        return Ending(reports, error=SilentCorruptionError(f"{found}{remedy}", found.mpmd_idxs))

    def _replace_faulty(self, found: CorruptionReport, reports: Actions) -> Ending:
        """The groups that were wrong are replaced, and all go back to the snapshot before the difference."""
        self._dead.clear()
        for mpmd_idx in found.mpmd_idxs:
            reason = f"group {mpmd_idx} has computed or kept wrong bits"
            self._dead[mpmd_idx] = GroupDiedError(reason, mpmd_idx)
        ending = self._replace(CORRUPTED)
        return ending._replace(actions=[*reports, *ending.actions])


_UNKNOWN = (
    '. on_corruption="replace" replaces no group, because it cannot be told which one is wrong. '
    "Start again from a checkpoint"
)
