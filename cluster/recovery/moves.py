"""Moves of groups to other nodes or devices while steps run: a part of the state machine of ``membership``.

A move is a recovery from a death that was awaited: steps wait, all values are copied, other processes take
the place of the group's, and nothing has to be run again.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping

from cluster.recovery import actions as do
from cluster.recovery.actions import Actions
from cluster.recovery.journal import Journal
from cluster.recovery.left_out import LeftOut
from cluster.recovery.report import DRAINED, GROWN, REPLACED, SHRUNK
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
      dead: the groups that are being replaced.
      left_out: the groups that recovery leaves out.

    Attributes:
      is_paused: a group is about to move, and new requests wait.
      leaving: the groups whose nodes are to end, or that move: their death is no failure.
      unwritten: copies that are perhaps still to be written to storage. The runtime changes it, at any time.
      said: by group, why it does not move, as the user was told; ``None`` stands for all groups.
    """

    def __init__(self, journal: Journal, dead: Mapping[int, GroupDiedError], left_out: LeftOut):
        self.is_paused = False
        self.leaving: set[int] = set()
        self.unwritten: set[Handle] = set()
        self.said: dict[int | None, str] = {}
        self._journal = journal
        self._dead = dead
        self._left_out = left_out
        self._next: collections.deque[tuple[int, str]] = collections.deque()
        self._mpmd_idx: int | None = None  # the group that moves; and of this move:
        self._kind = DRAINED
        self._attempt = 0  # of the journal, at the start

    @property
    def is_superseded(self) -> bool:
        """Whether a group has died since the move has begun."""
        return bool(self._dead) or self._attempt != self._journal.attempt

    def begin(self, kinds: Mapping[int, str]) -> Actions:
        """These groups are to move. Without any, there may be room for spares that was not there before."""
        kinds = self._left_out.moves(kinds)
        self.leaving |= {mpmd_idx for mpmd_idx, kind in kinds.items() if kind == DRAINED}
        self._next = collections.deque(kinds.items())
        return self._begin_next() if kinds else [do.StartSpares()]

    def _begin_next(self) -> Actions:
        self._mpmd_idx, self.is_paused = None, False
        if not self._next:
            return []
        self._mpmd_idx, self._kind = self._next.popleft()
        self._attempt = self._journal.attempt
        return self._unless_saving(do.Prepare(self._mpmd_idx, self._kind))

    def _unless_saving(self, *jobs: do.Job) -> Actions:
        """Returns ``jobs``; but a group whose node is not to end stays while a checkpoint is being saved."""
        if self.unwritten and self._kind != DRAINED:
            return self._stay("a checkpoint is being saved")
        return [*jobs]

    def prepared(self, has_place: bool) -> Actions:
        """Processes are ready, or there is no place for them."""
        return [do.AwaitRunning()] if has_place else self._stay("there is no other place for it")

    def pause(self) -> Actions:
        """No group is being replaced: new requests wait from now on."""
        self.is_paused = True
        return self._unless_saving(do.AwaitSaves(), do.FindDead())

    def check(self, dead: Collection[int]) -> Actions:
        """Handles the answer to ``FindDead``: the groups that are silent.

        If another group is silent, the moving group stays: the silent one may hold the only other copy of its
        values.
        """
        silent = sorted(set(dead) - self._left_out.dead.keys())
        said = f"no answer from {', '.join(f'group {mpmd_idx}' for mpmd_idx in silent)}"
        if silent and silent != [self._mpmd_idx]:
            return self._stay(said)
        return [*(self._say(self._mpmd_idx, said) if silent else ()), do.AwaitSnapshot()]

    def copy(self) -> Actions | None:
        """No snapshot is under way, or none that will count soon. ``None``: the group may leave now."""
        if self.is_superseded:  # the next look shows what is to be done now
            return [do.Discard(), *self._begin_next()]
        # Steps may have been asked since the last snapshot was begun. If a checkpoint takes long, or the
        # snapshot has failed, some of them are run again.
        if self._journal.snapshot is None and self._journal.steps_since_snapshot:
            return [do.BeginSnapshot(), do.AwaitSnapshot()]
        return None

    def leave(self) -> tuple[GroupDiedError, str]:
        """The group leaves. Returns this as a death, and why it moves."""
        assert self._mpmd_idx is not None, "no group moves"
        self.leaving.add(self._mpmd_idx)
        how = "begins anew" if self._kind == REPLACED else "moves"
        death = GroupDiedError(f"group {self._mpmd_idx} {how}: {_REASONS[self._kind]}", self._mpmd_idx)
        return death, self._kind

    def end(self) -> Actions:
        """The group has moved."""
        assert self._mpmd_idx is not None, "no group moves"
        self.leaving.discard(self._mpmd_idx)
        self.said.pop(self._mpmd_idx, None)
        return self._begin_next()

    def fail(self, job: do.Job, error: BaseException) -> Actions:
        """A job has failed, of the move or of who looks after all places."""
        of_move = isinstance(job, do.MoveJob) or job == do.StartSpares(ends_move=True)
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
