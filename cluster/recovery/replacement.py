"""One replacement of groups, or going back without one: a part of the state machine of ``membership``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from cluster.recovery import actions as do
from cluster.recovery.journal import BEGINNING
from cluster.recovery.keepers import CopiesLostError
from cluster.recovery.logged import Logged, LoggedStep
from cluster.recovery.policy import FROM_DISK, FailureCounter
from cluster.recovery.report import Phases, RecoveryReport
from mpmd.errors import GroupDiedError, RecoveryError


class GroupLostError(RuntimeError):
    """Groups could not be replaced, because of ``__cause__``.

    Attributes:
      dead: the groups of which a process is gone or does not answer; empty if none is.
      beside: the groups that have died while new processes of other groups took their devices.
      unopened: the groups whose new processes have not taken their devices.
      node_is_gone: whether the node of a process is, which explains the death of a new process.
    """

    def __init__(
        self,
        dead: Collection[int],
        beside: Collection[int] = (),
        unopened: Collection[int] = (),
        node_is_gone: bool = False,
    ):
        super().__init__(f"groups {sorted(dead)} are dead, and groups {sorted(unopened)} have not started")
        self.dead = frozenset(dead)
        self.beside = frozenset(beside)
        self.unopened = frozenset(unopened)
        self.node_is_gone = node_is_gone


@dataclasses.dataclass
class Replacement:
    """Decides which groups to replace, and tries again while more groups die.

    Processes that were started before stay. Methods raise ``RecoveryError`` to give up.

    Attributes:
      death: the first death, or the reason to go back.
      step: the step that the dead group was running.
      kind: as of ``RecoveryReport``.
      processes_per_group: the number of processes of each group.
      failures: counts the failures of the run.
      phases: the seconds so far.
      snapshot: number of the snapshot to go back to.
      lost: why no group has a value any more, if so.
      replaced: all groups with new processes, which have to load their programs.
      is_detached: no call on a group can be made any more, or the calls are about to be ended.
      attempt, replayed: the attempt of the journal after this, and the steps that it repeats.
    """

    death: GroupDiedError
    step: LoggedStep | None
    kind: str
    processes_per_group: tuple[int, ...]
    failures: FailureCounter
    phases: Phases = dataclasses.field(default_factory=Phases)
    snapshot: int = BEGINNING
    lost: str | None = None
    replaced: set[int] = dataclasses.field(default_factory=set)
    is_detached: bool = False
    attempt: int = 0
    replayed: Sequence[LoggedStep] = ()

    def begin(self, dead: Collection[int], is_failure: bool, snapshot: int) -> do.Recover:
        """Begins when no call on a group can be made any more and the ``dead`` groups are known."""
        if is_failure and (reason := self.failures.count(self.death.mpmd_idx, self.step)):
            raise self._unrecoverable(reason, self.death)
        self.snapshot = snapshot
        return self._replace(dead)

    def _replace(self, dead: Collection[int]) -> do.Recover:
        self.replaced.update(dead)
        return do.Recover(frozenset(dead), frozenset(self.replaced), self.snapshot, self.phases)

    def begin_again(self, error: BaseException) -> do.Recover:
        """Tries again when other groups have died, when there is no room, or without copies."""
        if not isinstance(error, GroupLostError):
            raise self._unrecoverable(str(error), error)
        if isinstance(error.__cause__, CopiesLostError):
            self.snapshot, self.lost = BEGINNING, str(error.__cause__)
            self.replaced |= error.beside
            return self._replace(())
        self._count(error)
        self.replaced |= error.beside
        return self._replace(error.dead | self._unusable(error))

    def _count(self, lost: GroupLostError) -> None:
        """Counts a failure, unless groups have died that this replaces for the first time.

        They may have died together: of a node that is gone, Ray reports one process after the other. So one
        recovery is one failure. Neither are new processes to blame when their node is gone.
        """
        dead = lost.dead | lost.beside
        if lost.node_is_gone or (dead and not self.replaced & dead):
            return
        if reason := self.failures.count(self.death.mpmd_idx, None):
            cause = lost.__cause__ or lost
            raise self._unrecoverable(f"{reason}; the last time because {cause}", cause)

    def _unusable(self, lost: GroupLostError) -> set[int]:
        """The groups whose new processes cannot be kept when they could not be replaced."""
        if lost.unopened or not lost.dead:  # the new processes may be why
            return set(lost.unopened or self.replaced)
        # Processes of one group may be meeting, and one of them has perhaps given up.
        return {i for i in self.replaced if self.processes_per_group[i] > 1}

    def _unrecoverable(self, reason: str, cause: BaseException) -> RecoveryError:
        message = f"{self.death}. The groups do not recover: {reason}. {FROM_DISK}"
        error = RecoveryError(message, self.death.mpmd_idx)
        error.__cause__ = cause
        return error

    def begin_replay(self, attempt: int, entries: Iterable[Logged]) -> None:
        """Groups repeat ``entries``, in an attempt of the journal."""
        self.attempt = attempt
        self.replayed = [entry for entry in entries if isinstance(entry, LoggedStep)]

    def report(self) -> do.ReportRecovery:
        report = RecoveryReport(
            mpmd_idxs=tuple(sorted(self.replaced)),
            reason=str(self.death),
            step=self.step.ordinal if self.step else None,
            num_replayed=sum(step.failure is None for step in self.replayed),
            seconds=self.phases.seconds,
            lost=self.lost,
            kind=self.kind,
        )
        return do.ReportRecovery(report, self.phases)
