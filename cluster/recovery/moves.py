"""Moves groups to other nodes or devices while steps run.

A move is a recovery from a death that was awaited: steps wait, all values are copied, other processes take
the place of the group's, and nothing has to be run again. Groups move one after the other, since the keepers
of the moving group's values have to stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import weakref
from collections.abc import Sequence

from cluster.recovery.background import Background
from cluster.recovery.ledger import Ledger
from cluster.recovery.processes import Processes
from cluster.recovery.report import DRAINED, GROWN, REPLACED, SHRUNK, Phases
from mpmd.errors import GroupDiedError

_LOOK_SECONDS = 1.0

_SAVE_SECONDS = 10.0
"""The seconds that a checkpoint may keep a group on a node that is to end; other moves wait for it."""

_REASONS = {
    DRAINED: "its node is to end",
    SHRUNK: "it is to share a node with others",
    GROWN: "the cluster has room for it",
    REPLACED: "it has died, and mesh.replace asks for it",
}


@dataclasses.dataclass
class Move:
    """A group moves, for a reason that ``kind`` names, as of ``RecoveryReport``.

    Attributes:
      attempt: the attempt of the journal in which the move has begun.
      is_ready: processes are ready for the group, which leaves when groups have answered all.
      has_left: the group is being replaced.
      has_arrived: all groups have run the steps since the last snapshot again, of which there are few.
    """

    mpmd_idx: int
    kind: str
    attempt: int
    phases: Phases = dataclasses.field(default_factory=Phases)
    is_ready: bool = False
    has_left: bool = False
    has_arrived: bool = False

    @property
    def how(self) -> str:
        return "begin anew" if self.kind == REPLACED else "move"

    @property
    def death(self) -> GroupDiedError:
        how = "begins anew" if self.kind == REPLACED else "moves"
        return GroupDiedError(f"group {self.mpmd_idx} {how}: {_REASONS[self.kind]}", self.mpmd_idx)


class Moves:
    """Looks after the places of groups.

    Args:
      ledger: the requests to groups; its lock guards all attributes.
      processes: of the groups.
      background: looks and moves groups while steps run.

    Attributes:
      under_way: the move that was begun, until what the group has left is given back.
      leaving: the groups whose nodes are to end, or that move: their death is no failure.
      looks: has an item for each look after the groups that is not to wait. Callers may hold any lock.
      said: by group, why it does not move, as the user was told; ``None`` stands for all groups.
    """

    def __init__(self, ledger: Ledger, processes: Processes, background: Background):
        self.under_way: Move | None = None
        self.leaving: set[int] = set()
        self.looks: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.said: dict[int | None, str] = {}
        self._ledger = ledger
        self._processes = processes
        self._background = background
        self._is_looking = False

    @property
    def is_ready(self) -> bool:
        """Whether a group waits for quiet, to leave then."""
        move = self.under_way
        return move is not None and move.is_ready and self._is_possible(move)

    def start(self) -> None:
        watching = weakref.ref(self), self.looks
        threading.Thread(target=_watch, args=watching, name="mpmd places", daemon=True).start()

    def look_after(self) -> None:
        """Moves the groups that are to move, in another thread. Is called now and then, by one thread."""
        with self._ledger.changed:
            self._ledger.notify()  # a copy may not have to be written any more
            if self._is_looking or self._ledger.dead:
                return
            self._is_looking = True
        self._background.start("moves", self._look)

    def _look(self) -> None:
        try:
            kinds = self._processes.groups_to_move()
            with self._ledger.changed:
                kinds = self._ledger.left_out.moves(kinds)
                self.leaving |= {mpmd_idx for mpmd_idx, kind in kinds.items() if kind == DRAINED}
            for mpmd_idx, kind in kinds.items():
                self._move(mpmd_idx, kind)
            self._give_back()
        except Exception as error:
            self._say_of_all(error)
        with self._ledger.changed:
            self._is_looking = False
            self._ledger.notify()

    def _move(self, mpmd_idx: int, kind: str) -> None:
        ledger = self._ledger
        with ledger.changed:
            if ledger.error is not None:
                return
            self.under_way = move = Move(mpmd_idx, kind, ledger.journal.attempt)
        try:
            if why := self._prepare(move) or self._leave(move):
                self._stay(move, why)
            self._give_back()
        except RuntimeError as error:
            self._stay(move, str(error))
        except Exception as error:
            self._say_of_all(error)
        finally:
            with ledger.changed:
                self.under_way = None
                ledger.notify()
            self._processes.spares.discard()

    def _give_back(self) -> None:
        if self._ledger.error is None:
            self._processes.spares.start_missing()

    def _prepare(self, move: Move) -> str | None:
        """Has processes ready, while steps run. Returns why the group stays, if it does.

        If another group is silent, the moving group stays: the silent one may hold the only other copy of its
        values.
        """
        if self._has_to_stay(move):
            return _SAVING
        move.phases.enter("prepared")
        self._ledger.groups.ask_health()
        if not self._processes.prepare_move(move.mpmd_idx, move.kind):
            return "there is no other place for it"
        move.phases.enter("copied")
        silent = sorted(self._processes.find_dead() - self._ledger.left_out.dead.keys())
        said = f"no answer from {', '.join(f'group {mpmd_idx}' for mpmd_idx in silent)}"
        if silent and silent != [move.mpmd_idx]:
            return said
        if silent:
            self._say_once(move.mpmd_idx, said)
        return None

    def _leave(self, move: Move) -> str | None:
        """Waits until the group has left and all steps are answered again, or returns why it stays.

        Without a reason it stays if a group has died meanwhile: the next look decides again.
        """
        ledger = self._ledger
        with ledger.changed:
            ledger.changed.wait_for(
                lambda: not ledger.unwritten or not self._is_of_attempt(move) or ledger.error, _SAVE_SECONDS
            )
            move.is_ready = True
            ledger.notify()
            ledger.changed.wait_for(
                lambda: ledger.error or move.has_left or (ledger.is_running and not self._is_possible(move))
            )
            move.is_ready = False
            if not move.has_left:
                return _SAVING if self._has_to_stay(move) and self._is_of_attempt(move) else None
            ledger.changed.wait_for(lambda: ledger.error or move.has_arrived)
            self.leaving.discard(move.mpmd_idx)
            self.said.pop(move.mpmd_idx, None)
        return None

    def _is_of_attempt(self, move: Move) -> bool:
        return move.attempt == self._ledger.journal.attempt

    def _has_to_stay(self, move: Move) -> bool:
        return bool(self._ledger.unwritten) and move.kind != DRAINED

    def _is_possible(self, move: Move) -> bool:
        return self._is_of_attempt(move) and not self._has_to_stay(move)

    def explain(self, late: Sequence[int]) -> tuple[str, str]:
        names = ", ".join(f"group {mpmd_idx}" for mpmd_idx in late)
        return names, "".join(f"; {self.said[mpmd_idx]}" for mpmd_idx in late if mpmd_idx in self.said)

    def _stay(self, move: Move, why: str) -> None:
        how = f"group {move.mpmd_idx} does not {move.how}, though {_REASONS[move.kind]}"
        self._say_once(move.mpmd_idx, f"{how}: {why}")

    def _say_of_all(self, error: Exception) -> None:
        self._say_once(None, f"the places of groups cannot be looked after: {type(error).__name__}: {error}")

    def _say_once(self, mpmd_idx: int | None, message: str) -> None:
        """Tells the user about a group, or about all groups, unless the last message was the same."""
        if self.said.get(mpmd_idx) != message:
            self.said[mpmd_idx] = message
            self._background.say_unless_ended(message)


_SAVING = "a checkpoint is being saved"


def _watch(moves: weakref.ref[Moves], looks: queue.SimpleQueue[None]) -> None:
    """Looks after the places now and then, in a thread that does not keep the mesh alive."""
    while True:
        with contextlib.suppress(queue.Empty):
            looks.get(timeout=_LOOK_SECONDS)
        alive = moves()
        if alive is None or alive._background.has_ended:
            return
        alive.look_after()
        del alive
