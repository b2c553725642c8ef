"""Looks after the groups of a mesh: has them replaced, go back, repeat steps, copy values, and move.

At most one thread works on all groups: it carries out one operation after the other, each from its first to
its last phase, as long as ``_begin_next`` has one for the present state. Beside it, a thread has a snapshot
travel, and another thread prepares moves. ``docs/architecture/membership.md`` has the states and the
invariants.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

from cluster.recovery.background import Background
from cluster.recovery.copies import Copies, CopiesLostError
from cluster.recovery.journal import BEGINNING
from cluster.recovery.ledger import Ledger, State
from cluster.recovery.logged import Asked, LoggedStep
from cluster.recovery.moves import Moves
from cluster.recovery.policy import (
    REPLACE,
    UNLOCATED_REMEDY,
    WARN,
    FailureCounter,
    Recovery,
    loss_of_values,
)
from cluster.recovery.processes import Processes
from cluster.recovery.replacement import Replacement
from cluster.recovery.report import (
    COMPUTED,
    CORRUPTED,
    DIED,
    FAILED,
    CorruptionReport,
    RecoveryReport,
)
from cluster.recovery.rewinds import NOTHING, RewindRequest, Rewinds, Rewound
from cluster.recovery.snapshots import Snapshots
from cluster.tcp.connection import Connection
from mpmd.errors import GroupDiedError, RecoveryError, SilentCorruptionError

Operation = Callable[[], None]


class Supervisor:
    """The ledger's lock guards all attributes."""

    def __init__(
        self,
        ledger: Ledger,
        processes: Processes,
        copies: Copies,
        policy: Recovery,
        on_recovery: Callable[[RecoveryReport], None],
        on_corruption: Callable[[CorruptionReport], None],
    ):
        self.background = Background(ledger, processes)
        self.moves = Moves(ledger, processes, self.background)
        self.rewinds = Rewinds(ledger, policy, on_corruption, self.background)
        self.snapshots = Snapshots(ledger, processes, copies, policy, self.background)
        self._ledger = ledger
        self._journal = ledger.journal
        self._groups = ledger.groups
        self._processes = processes
        self._copies = copies
        self._policy = policy
        self._on_recovery = on_recovery
        self._failures = FailureCounter(policy.max_failures)
        self._replacement: Replacement | None = None  # that is to begin
        self._replayed: Replacement | None = None  # to report, when its steps are answered
        self._marked = BEGINNING  # the committed snapshot, as ``copies`` was told
        self._is_working = self._has_released = False
        self.last_checkpoint: str | None = None
        ledger.wake = _weakly(self._wake)

    def attach(self, connections: Sequence[Connection]) -> None:
        self._groups.attach(self._processes.calls(connections, _weakly(self.note_death)))

    # Threads.

    def _wake(self) -> None:
        """Has a thread do what the present state asks for, unless a thread does so already."""
        ledger, replayed = self._ledger, self._replayed
        if replayed is not None and (ledger.error is not None or replayed.has_ended(self._journal.attempt)):
            self._replayed = None
            self._report(replayed)
        if self._marked != self._journal.committed:
            self._marked = self._journal.committed
            if self._marked != BEGINNING:
                self._copies.mark_committed()
        if ledger.error is not None and not self._has_released:
            self._has_released = True
            self._processes.stop.set()
            self.background.start("release", self._processes.release)
        if ledger.is_running and (self.snapshots.is_due or self.rewinds.asked or self.moves.is_ready):
            ledger.state = State.QUIESCING
        if not self._is_working and (self._replacement is not None or ledger.is_quiet):
            self.background.start("recovery", self._work)

    def close(self, error: RuntimeError) -> None:
        """The user ends the mesh, and releases the processes."""
        with self._ledger.changed:
            self._has_released = True
            self._processes.stop.set()
            self._ledger.end(error)

    def _work(self) -> None:
        with self._ledger.changed:
            if self._is_working:
                return
            self._is_working = True
        while (operation := self._begin_next()) is not None:
            operation()

    def _begin_next(self) -> Operation | None:
        """Begins the next operation on all groups; ``None`` if there is none, or it has to wait."""
        with self._ledger.changed:
            operation: Operation | None = None
            while operation is None and (self._replacement is not None or self._ledger.is_quiet):
                if self._has_to_wait:
                    break
                operation = self._recover if self._replacement is not None else self._begin_while_quiet()
            self._is_working = operation is not None
            return operation

    @property
    def _has_to_wait(self) -> bool:
        """Whether a snapshot, a checkpoint, or a group that is left out has to end something before."""
        ledger = self._ledger
        if self._replacement is not None:
            return bool(ledger.unlogged or ledger.error)
        if self.snapshots.is_travelling:
            return True
        if self._journal.failed is not None:
            return bool(ledger.unlogged)
        begins_rewind = self.rewinds.asked is not None and not self._journal.unasked
        return begins_rewind and (ledger.awaits_checkpoint or bool(ledger.unlogged))

    def _begin_while_quiet(self) -> Operation | None:
        """Begins what groups were to be quiet for: they have answered all that is logged."""
        ledger, journal = self._ledger, self._journal
        if (step := journal.failed) is not None:
            self.rewinds.interrupt()
            text = f"{step} failed, and all groups go back to before it"
            reason = GroupDiedError(text, min(step.groups))
            return self._begin_going_back(reason, step)
        if journal.unasked:  # since groups were to be quiet: they are asked in the order of the log
            ledger.resume()
        elif self.rewinds.asked is not None:
            return self._begin_rewind(self.rewinds.asked)
        elif self.moves.is_ready:
            self._leave()
        else:
            if self.snapshots.is_due:
                self.snapshots.begin()
            ledger.resume()
        return None

    # Deaths.

    def note_death(self, error: GroupDiedError) -> None:
        """A group counts as dead. May be called more than once."""
        ledger, mpmd_idx = self._ledger, error.mpmd_idx
        with ledger.changed:
            if ledger.error is not None or mpmd_idx in ledger.dead:
                return
            if mpmd_idx in ledger.left_out.groups:
                ledger.left_out.dead.setdefault(mpmd_idx, error)
            else:
                ledger.dead[mpmd_idx] = error
                if ledger.state is not State.RECOVERING:  # else the operation takes the death into account
                    self._replace(error, self._journal.current_step(mpmd_idx), DIED)
            ledger.notify()

    def _replace(self, death: GroupDiedError, step: LoggedStep | None, kind: str) -> Replacement:
        """Has dead groups replaced, and all groups connect again and go back."""
        self._ledger.suspend()
        self.snapshots.is_due = False
        self.rewinds.interrupt()
        self._replacement = replacement = self._new_replacement(death, step, kind)
        return replacement

    def _new_replacement(self, death: GroupDiedError, step: LoggedStep | None, kind: str) -> Replacement:
        return Replacement(death, step, kind, self._groups.processes_per_group, self._failures)

    def _replace_for(self, kind: str, error: BaseException | None = None) -> None:
        """As ``_replace``, for deaths that were noted while groups went back, or else for an error."""
        dead = self._ledger.dead
        if isinstance(error, GroupDiedError) and error.mpmd_idx in self._ledger.logged:
            dead.setdefault(error.mpmd_idx, error)  # which is noted a moment later
        if dead:
            self._replace(min(dead.items())[1], None, kind if error is None else DIED)
        else:
            reason = f"all groups went back, and one could not: {error}"
            self._replace(self._reason(reason), self._journal.failed, kind)

    def _reason(self, text: str) -> GroupDiedError:
        """The reason to go back with nobody dead, in the name of the first group."""
        return GroupDiedError(text, min(self._ledger.logged, default=0))

    def _recover(self) -> None:
        ledger, replacement = self._ledger, self._replacement
        assert replacement is not None, "no group is to be replaced"
        try:
            self._groups.detach(replacement.death)  # no death is noted until ``attach``
            with ledger.changed:
                self._replacement = None
                dead = set(ledger.dead)
                is_failure = bool(dead - self.moves.leaving)
                ledger.dead.update(ledger.left_out.dead)
                self.moves.leaving -= set(ledger.dead)
                replacement.begin(set(ledger.dead), is_failure, self._journal.committed)
                loads = dict(ledger.releases.loads)
            connections = replacement.carry_out(self._processes, self._copies, loads)
        except Exception as error:
            unrecoverable = replacement.unrecoverable(str(error), error)
            with ledger.changed:
                ledger.end(error if isinstance(error, RecoveryError) else unrecoverable)
            return
        with ledger.changed:
            if ledger.error is None:
                self.attach(connections)
                self._replay(replacement)
                return
        for connection in connections:
            connection.close()

    def _replay(self, replacement: Replacement) -> None:
        ledger = self._ledger
        if replacement.replaced and (losses := ledger.left_out.begin_anew(replacement.replaced)):
            ledger.lose_values(losses)
        if replacement.lost is not None:
            ledger.lose_all(loss_of_values(replacement.death, replacement.lost, self.last_checkpoint))
        entries = ledger.go_back()
        replacement.begin_replay(self._journal.attempt, entries)
        self._replayed = replacement
        for entry in entries:
            ledger.ask(entry)
        ledger.notify()

    def _report(self, replacement: Replacement) -> None:
        shares_with = {
            process.mpmd_idx: process.shares_with
            for process in self._processes.infos
            if process.shares_with is not None
        }
        report = replacement.report(shares_with)
        self._on_recovery(report)
        self.background.say(report)
        if (move := self.moves.under_way) is not None:
            move.has_arrived = move.has_left

    # Going back with nobody dead.

    def _begin_going_back(self, reason: GroupDiedError, step: LoggedStep | None) -> Operation:
        self._ledger.state = State.RECOVERING
        replacement = self._new_replacement(reason, step, FAILED)
        replacement.phases.enter("restored")
        return functools.partial(self._go_back, replacement)

    def _go_back(self, replacement: Replacement) -> None:
        """Has all groups, which have answered all, go back to the last snapshot."""
        fault: Exception | None = None
        try:
            self._copies.go_back(self._journal.committed)
        except Exception as error:
            fault = error
        replacement.phases.enter("replayed")  # until the report
        with self._ledger.changed:
            if self._ledger.error is not None:
                return
            if fault is not None:
                self._replace_for(FAILED, fault)
            elif self._ledger.dead:
                self._replace_for(DIED)
            else:
                self._replay(replacement)

    # Rewinds.

    def _begin_rewind(self, request: RewindRequest) -> Operation | None:
        entries = self._journal.repeatable
        if any(isinstance(entry, LoggedStep) for entry in entries):
            self._ledger.state = State.RECOVERING
            return functools.partial(self._rewind, request, entries)
        self.rewinds.settle(NOTHING)
        self._ledger.resume()
        return None

    def _rewind(self, request: RewindRequest, entries: Sequence[Asked]) -> None:
        rewound: Rewound = NOTHING
        fault: Exception | None = None
        try:
            rewound = self.rewinds.carry_out(request, entries, self._copies)
        except Exception as error:
            fault = error
        with self._ledger.changed:
            going_back = None if self._ledger.error else self._end_rewind(entries, rewound, fault)
        if going_back is not None:
            going_back()

    def _end_rewind(
        self, entries: Sequence[Asked], rewound: Rewound, fault: Exception | None
    ) -> Operation | None:
        """Has groups run again, or go back once more: over new connections, or by the operation returned."""
        ledger = self._ledger
        if isinstance(fault, RecoveryError):
            ledger.end(fault)
        elif isinstance(fault, CopiesLostError) and not ledger.dead:  # no group has gone back
            self.rewinds.report(CorruptionReport.of_copies(str(fault)))
            self._settle_rewind(NOTHING)
        elif fault is not None:
            self._replace_for(FAILED, fault)
        elif ledger.dead:
            self.rewinds.interrupt(rewound)
            self._replace_for(DIED)
        elif rewound.late is not None:
            self.rewinds.interrupt(rewound)
            reason = f"all groups go back without a comparison of their steps: {rewound.late}"
            return self._begin_going_back(self._reason(reason), None)
        else:
            self._compare(entries, rewound)
        return None

    def _compare(self, entries: Sequence[Asked], rewound: Rewound) -> None:
        found, reaction = self.rewinds.compare(entries, rewound), self._policy.on_corruption
        if found is None or reaction == WARN:
            self._settle_rewind(rewound)
        elif reaction == REPLACE and found.kind == COMPUTED:
            for i in found.mpmd_idxs:
                self._ledger.dead[i] = GroupDiedError(f"group {i} has computed or kept wrong bits", i)
            self.rewinds.interrupt(rewound)
            self._replace_for(CORRUPTED)
        else:
            remedy = UNLOCATED_REMEDY if reaction == REPLACE else ""
            self._ledger.end(SilentCorruptionError(f"{found}{remedy}", found.mpmd_idxs))

    def _settle_rewind(self, rewound: Rewound) -> None:
        """A snapshot that was due with the step before the check is begun after it."""
        self.rewinds.settle(rewound)
        self.snapshots.note_step()
        self._ledger.resume()

    # Snapshots.

    def note_step(self) -> None:
        """A step was asked of groups; a check or a snapshot may be due after it, the check first."""
        self.rewinds.note_step()
        self.snapshots.note_step()
        self._ledger.notify()

    # Moves.

    def _leave(self) -> None:
        """The group that moves leaves, after a snapshot of all steps, so that few steps run again."""
        ledger, journal = self._ledger, self._journal
        move = self.moves.under_way
        assert move is not None, "no group moves"
        # If a checkpoint takes long, which no snapshot overtakes, or the snapshot fails, steps run again.
        if journal.snapshot is None and journal.steps_since_snapshot and not journal.keeps_copies:
            self.snapshots.begin()
            return
        move.has_left = True
        self.moves.leaving.add(move.mpmd_idx)
        ledger.dead[move.mpmd_idx] = move.death
        replacement = self._replace(move.death, None, move.kind)
        replacement.phases = move.phases


def _weakly(method: Callable) -> Callable:
    """Returns a method as a function that does not keep its object alive, and then does nothing."""
    alive = weakref.WeakMethod(method)

    def call_if_alive(*arguments: object) -> None:
        if (living := alive()) is not None:
            living(*arguments)

    return call_if_alive
