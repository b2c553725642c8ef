"""One replacement of groups, or going back without one: a part of the state machine of ``membership``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from cluster.recovery import actions as do
from cluster.recovery.actions import Actions
from cluster.recovery.events import Faulted, Lost
from cluster.recovery.journal import BEGINNING
from cluster.recovery.keepers import CopiesLostError
from cluster.recovery.logged import LoggedStep
from cluster.recovery.policy import FROM_DISK, FailureCounter
from mpmd.errors import GroupDiedError, RecoveryError


@dataclasses.dataclass
class Replacement:
    """Has new processes take the place of dead ones, and all groups go back to a snapshot.

    Repeats this while more groups die; processes that were started before stay. Methods raise
    ``RecoveryError`` to give up.

    Attributes:
      death: the first death, or the reason to go back.
      step: the step that the dead group was running.
      kind: as of ``RecoveryReport``.
      processes_per_group: the number of processes of each group.
      failures: counts the failures of the run.
      snapshot: number of the snapshot to go back to.
      lost: why no group has a value any more, if so.
      unopened: the groups whose new processes have not taken their devices yet.
      replaced: all groups with new processes, which have to load their programs.
    """

    death: GroupDiedError
    step: LoggedStep | None
    kind: str
    processes_per_group: tuple[int, ...]
    failures: FailureCounter
    snapshot: int = BEGINNING
    lost: str | None = None
    unopened: set[int] = dataclasses.field(default_factory=set)
    replaced: set[int] = dataclasses.field(default_factory=set)

    def begin(self, dead: Collection[int], is_failure: bool, snapshot: int) -> Actions:
        """Begins when no call on a group can be made any more and the ``dead`` groups are known."""
        if is_failure and (reason := self.failures.count(self.death.mpmd_idx, self.step)):
            raise self._unrecoverable(reason, self.death)
        self.snapshot = snapshot
        return self._replace(dead)

    def _replace(self, dying: Collection[int]) -> Actions:
        killing, starting = self._start(dying)
        return [killing, do.Reset(frozenset(self.unopened)), starting]

    def _start(self, dying: Collection[int]) -> tuple[do.Kill, do.Start]:
        self.unopened.update(dying)
        self.replaced.update(dying)
        return do.Kill(frozenset(dying)), do.Start(frozenset(dying))

    def open(self, opened: Collection[int] = ()) -> Actions:
        """Processes were started, or have taken their devices."""
        self.unopened.difference_update(opened)
        if self.unopened:
            return [do.Open(frozenset(self.unopened))]
        return [
            do.AwaitReset(),
            do.CheckCopies(self.snapshot),
            do.Connect(),  # after which a process knows what a program's messages need
            do.Load(frozenset(self.replaced)),
            do.Restore(self.snapshot),
            do.ConnectDriver(),
        ]

    def start_beside(self, lost: Lost) -> Actions:
        """Another group has died while new processes take their devices, which they go on to do."""
        self._count(lost.error, {lost.mpmd_idx}, lost.node_is_gone)
        return [*self._start({lost.mpmd_idx})]

    def begin_again(self, fault: Faulted) -> Actions:
        """A job has failed: another group has died, or there are no copies or there is no room."""
        error, dead = fault.error, fault.dead
        if isinstance(error, CopiesLostError):
            self.snapshot, self.lost = BEGINNING, str(error)
            return self._replace(())
        if dead is None or isinstance(fault.job, do.Detach):
            raise self._unrecoverable(str(error), error)
        self._count(error, dead, fault.node_is_gone)
        return self._replace(dead | self._unusable(dead))

    def _unusable(self, dying: Collection[int]) -> set[int]:
        """The groups whose new processes cannot be kept when a job has failed."""
        if self.unopened or not dying:  # they may be why
            return set(self.unopened or self.replaced)
        # Processes of one group may be meeting, and one of them has perhaps given up.
        return {i for i in self.replaced if self.processes_per_group[i] > 1}

    def _count(self, failure: BaseException, dying: Collection[int], node_is_gone: bool) -> None:
        """Counts a failure, unless groups have died that this replaces for the first time.

        They may have died together: of a node that is gone, Ray reports one process after the other. So one
        recovery is one failure. Neither are new processes to blame when their node is gone.
        """
        if node_is_gone or (dying and not self.replaced & set(dying)):
            return
        if reason := self.failures.count(self.death.mpmd_idx, None):
            raise self._unrecoverable(f"{reason}; the last time because {failure}", failure)

    def _unrecoverable(self, reason: str, cause: BaseException) -> RecoveryError:
        message = f"{self.death}. The groups do not recover: {reason}. {FROM_DISK}"
        error = RecoveryError(message, self.death.mpmd_idx)
        error.__cause__ = cause
        return error
