"""Moves of groups to other nodes or devices while steps run: a part of the state machine of ``membership``.

A move is a recovery from a death that was awaited: steps wait, all values are copied, other processes take
the place of the group's, and nothing has to be run again.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence

from cluster.recovery import actions as do
from cluster.recovery.actions import Actions
from cluster.recovery.journal import Journal
from cluster.recovery.left_out import LeftOut
from cluster.recovery.report import DRAINED, GROWN, REPLACED, SHRUNK, Phases
from mpmd.errors import GroupDiedError
from mpmd.runtime.requests import Handle

_REASONS = {
    DRAINED: "its node is to end",
    SHRUNK: "it is to share a node with others",
    GROWN: "the cluster has room for it",
    REPLACED: "it has died, and mesh.replace asks for it",
}


class Moves:
    """Moves one group at a time, since the keepers of the moving group's values have to stay.

    Args:
      journal: the requests to groups.
      left_out: the groups that recovery leaves out.

    Attributes:
      is_ready: processes are ready for the group that moves, which leaves when groups have answered all.
      leaving: the groups whose nodes are to end, or that move: their death is no failure.
      unwritten: copies that are perhaps still to be written to storage.
      said: by group, why it does not move, as the user was told; ``None`` stands for all groups.
    """

    def __init__(self, journal: Journal, left_out: LeftOut):
        self.is_ready = False
        self.leaving: set[int] = set()
        self.unwritten: set[Handle] = set()
        self.said: dict[int | None, str] = {}
        self._journal = journal
        self._left_out = left_out
        self._next: collections.deque[tuple[int, str]] = collections.deque()
        self._mpmd_idx: int | None = None  # the group that moves; and of this move:
        self._kind = DRAINED
        self._phases = Phases()
        self._attempt = 0  # of the journal, at the start
        self._has_waited = False  # for checkpoints that are being saved

    @property
    def is_under_way(self) -> bool:
        """Whether a move was begun, and the resources that the group has left are not given back yet."""
        return self._mpmd_idx is not None

    @property
    def is_blocked(self) -> bool:
        """Whether the group that is to leave waits for a checkpoint that is being saved."""
        return bool(self.unwritten) and not self._has_waited

    def begin(self, kinds: Mapping[int, str]) -> Actions:
        """These groups are to move. Without any, there may be room for spares that was not there before."""
        kinds = self._left_out.moves(kinds)
        self.leaving |= {mpmd_idx for mpmd_idx, kind in kinds.items() if kind == DRAINED}
        self._next = collections.deque(kinds.items())
        return self._begin_next() if kinds else [do.StartSpares()]

    def _begin_next(self) -> Actions:
        self._mpmd_idx, self.is_ready, self._has_waited = None, False, False
        if not self._next:
            return []
        self._mpmd_idx, self._kind = self._next.popleft()
        self._attempt, self._phases = self._journal.attempt, Phases()
        if self._has_to_stay:
            return self._stay(_SAVING)
        return [do.Prepare(self._mpmd_idx, self._kind, self._phases)]

    @property
    def _has_to_stay(self) -> bool:
        """Whether a checkpoint that is being saved keeps the group, whose node stays, where it is."""
        return bool(self.unwritten) and self._kind != DRAINED

    def prepare(self, silent: Collection[int] | None) -> Actions:
        """Processes are ready, or there is no place for them.

        If another group is silent, the moving group stays: the silent one may hold the only other copy of its
        values.

        Args:
          silent: the groups of which a process does not answer; ``None`` without a place.
        """
        if silent is None:
            return self._stay("there is no other place for it")
        silent = sorted(set(silent) - self._left_out.dead.keys())
        said = f"no answer from {', '.join(f'group {mpmd_idx}' for mpmd_idx in silent)}"
        if silent and silent != [self._mpmd_idx]:
            return self._stay(said)
        self.is_ready = True
        actions = self._say(self._mpmd_idx, said) if silent else []
        return [*actions, do.AwaitCheckpoints()] if self.unwritten else actions

    def expire(self) -> Actions:
        """Checkpoints that are being saved have had their time."""
        self._has_waited = True
        return []

    def give_up(self) -> Actions:
        """Gives up a move that is ready, if a group has died since it has begun, or has to stay."""
        if self._attempt != self._journal.attempt:  # the next look shows what is to be done now
            return [do.Discard(), *self._begin_next()]
        return self._stay(_SAVING) if self._has_to_stay else []

    def leave(self) -> tuple[GroupDiedError, str, Phases]:
        """The group leaves. Returns this as a death, why it moves, and the seconds so far."""
        assert self._mpmd_idx is not None, "no group moves"
        self.is_ready = False
        self.leaving.add(self._mpmd_idx)
        how = "begins anew" if self._kind == REPLACED else "moves"
        death = GroupDiedError(f"group {self._mpmd_idx} {how}: {_REASONS[self._kind]}", self._mpmd_idx)
        return death, self._kind, self._phases

    def end(self) -> Actions:
        """The group has moved."""
        assert self._mpmd_idx is not None, "no group moves"
        self.leaving.discard(self._mpmd_idx)
        self.said.pop(self._mpmd_idx, None)
        return self._begin_next()

    def explain(self, late: Sequence[int]) -> tuple[str, str]:
        """The names of groups that have not moved in time, and why, as the user was told."""
        names = ", ".join(f"group {mpmd_idx}" for mpmd_idx in late)
        return names, "".join(f"; {self.said[mpmd_idx]}" for mpmd_idx in late if mpmd_idx in self.said)

    def fail(self, job: do.Job, error: BaseException) -> Actions:
        """A job has failed, of the move or of who looks after all places."""
        of_move = isinstance(job, do.Prepare) or job == do.StartSpares(ends_move=True)
        if of_move and isinstance(error, RuntimeError):
            return self._stay(str(error))
        message = f"the places of groups cannot be looked after: {type(error).__name__}: {error}"
        actions = self._say(None, message)
        return [do.Discard(), *actions, *self._begin_next()] if of_move else actions

    def _stay(self, why: str) -> Actions:
        """Gives up the move until the next look, and tells the user why."""
        how = "begin anew" if self._kind == REPLACED else "move"
        message = f"group {self._mpmd_idx} does not {how}, though {_REASONS[self._kind]}: {why}"
        return [do.Discard(), *self._say(self._mpmd_idx, message), *self._begin_next()]

    def _say(self, mpmd_idx: int | None, message: str) -> Actions:
        """Tells the user about a group, or about all groups, unless the last message was the same."""
        if self.said.get(mpmd_idx) == message:
            return []
        self.said[mpmd_idx] = message
        return [do.Say(message)]


_SAVING = "a checkpoint is being saved"
