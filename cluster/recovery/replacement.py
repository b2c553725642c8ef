"""One replacement of groups, or going back without one: its phases, and when to try again or to give up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from cluster.driver.runtime import LoadRequests
from cluster.recovery.allocations import NoAllocationError
from cluster.recovery.copies import Copies, CopiesLostError
from cluster.recovery.journal import BEGINNING, FROM_DISK
from cluster.recovery.logged import Asked, LoggedStep
from cluster.recovery.policy import FailureCounter
from cluster.recovery.processes import Processes, SupersededError
from cluster.recovery.report import Phases, RecoveryReport
from cluster.tcp.connection import Connection
from mpmd.errors import GroupDiedError, RecoveryError


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
      dead: the groups whose processes are to be replaced now.
      replaced: all groups with new processes that have not loaded their programs yet, ``dead`` among them.
      snapshot: number of the snapshot to go back to.
      lost: why no group has a value any more, if so.
      attempt, replayed: the attempt of the journal after this, and the steps that it repeats.
    """

    death: GroupDiedError
    step: LoggedStep | None
    kind: str
    processes_per_group: tuple[int, ...]
    failures: FailureCounter
    phases: Phases = dataclasses.field(default_factory=Phases)
    dead: set[int] = dataclasses.field(default_factory=set)
    replaced: set[int] = dataclasses.field(default_factory=set)
    snapshot: int = BEGINNING
    lost: str | None = None
    attempt: int = 0
    replayed: Sequence[LoggedStep] = ()

    def begin(self, dead: Collection[int], is_failure: bool, snapshot: int) -> None:
        """Begins when no call on a group can be made any more and the ``dead`` groups are known."""
        if is_failure and (reason := self.failures.count(self.death.mpmd_idx, self.step)):
            raise self.unrecoverable(reason, self.death)
        self.snapshot = snapshot
        self._replace(dead)

    def _replace(self, dead: Collection[int]) -> None:
        self.dead = set(dead)
        self.replaced |= self.dead

    def carry_out(
        self, processes: Processes, copies: Copies, loads: Mapping[int, LoadRequests]
    ) -> Sequence[Connection]:
        """Replaces the processes of dead groups, connects all processes again, and has all groups go back.

        Tries again when other groups have died, when there is no room, or without copies.

        Args:
          loads: by program number, the requests by which groups load the program.

        Returns: the driver's new connections with all processes.
        Raises: ``SupersededError`` when the mesh was closed.
        """
        enter = self.phases.enter
        while True:
            unopened = self.dead
            processes.check_open()
            try:
                with contextlib.ExitStack() as undo:
                    enter("started")
                    copies.lose(processes.kill(self.dead))
                    processes.reset(self.dead, list(loads))
                    processes.start(self.dead)
                    processes.open(self.dead)
                    unopened = set()
                    processes.await_reset()
                    copies.check(self.snapshot)
                    enter("connected")
                    connections = processes.connect()
                    for connection in connections:
                        undo.enter_context(connection)
                    enter("loaded")  # after ``connect``, which says how the messages of programs travel
                    processes.load(self.replaced, loads)
                    enter("restored")
                    copies.restore(self.snapshot)
                    enter("replayed")  # until the report
                    undo.pop_all()
                    return connections
            except SupersededError:
                raise
            except CopiesLostError as lost:
                self.snapshot, self.lost = BEGINNING, str(lost)
                self._replace(())
            except Exception as error:
                # Of another error it is not known whose death it is a consequence of.
                dead = {error.mpmd_idx} if isinstance(error, GroupDiedError) else processes.find_dead()
                has_room = not isinstance(error, NoAllocationError)
                self.begin_again(
                    error, dead, unopened, has_room and bool(processes.allocations.without_node())
                )

    def begin_again(self, error: Exception, dead: set[int], unopened: set[int], node_is_gone: bool) -> None:
        """Decides which groups to replace next, when groups could not be replaced because of ``error``.

        One recovery is one failure, unless a new process has died: groups that this replaces for the first
        time may have died together, since of a node that is gone Ray reports one process after the other.
        Neither are new processes to blame when their node is gone.

        Args:
          dead: the groups of which a process is gone or does not answer; empty if none is.
          unopened: the groups whose new processes have not taken their devices.
          node_is_gone: whether the node of a process is.
        """
        is_failure = not node_is_gone and (not dead or bool(self.replaced & dead))
        if is_failure and (reason := self.failures.count(self.death.mpmd_idx, None)):
            raise self.unrecoverable(f"{reason}; the last time because {error}", error)
        self._replace(dead | self._unusable(dead, unopened))

    def _unusable(self, dead: set[int], unopened: set[int]) -> set[int]:
        """The groups whose new processes cannot be kept when they could not be replaced."""
        if unopened or not dead:  # the new processes may be why
            return unopened or self.replaced
        # Processes of one group may be meeting, and one of them has perhaps given up.
        return {i for i in self.replaced if self.processes_per_group[i] > 1}

    def unrecoverable(self, reason: str, cause: BaseException) -> RecoveryError:
        message = f"{self.death}. The groups do not recover: {reason}. {FROM_DISK}"
        error = RecoveryError(message, self.death.mpmd_idx)
        error.__cause__ = cause
        return error

    def begin_replay(self, attempt: int, entries: Iterable[Asked]) -> None:
        self.attempt = attempt
        self.replayed = [entry for entry in entries if isinstance(entry, LoggedStep)]

    def has_ended(self, attempt: int) -> bool:
        """Whether all steps of the replay are answered, or groups go back once more."""
        return self.attempt != attempt or not any(step.waiting for step in self.replayed)

    def report(self, shares_with: Mapping[int, int]) -> RecoveryReport:
        self.phases.enter(None)
        return RecoveryReport(
            mpmd_idxs=tuple(sorted(self.replaced)),
            reason=str(self.death),
            step=self.step.ordinal if self.step else None,
            num_replayed=sum(step.failure is None for step in self.replayed),
            seconds=self.phases.seconds,
            lost=self.lost,
            kind=self.kind,
            shares_with={guest: host for guest, host in shares_with.items() if guest in self.replaced},
        )
