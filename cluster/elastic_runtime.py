"""A runtime whose groups move to other places while a program runs: when nodes are to end, or return.

A move is a recovery from a death that was awaited: steps wait, all values are copied, other processes take
the place of the group's, and nothing has to be run again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

from cluster.actor_calls import ActorCalls
from cluster.connection import Connection
from cluster.driver import RayRuntime
from cluster.fleet import Fleet
from cluster.mover import Mover
from cluster.pending_calls import copy_of
from cluster.ray_session import RaySession
from cluster.recovering_runtime import RecoveringRuntime
from cluster.recovery import DRAINED, GROWN, SHRUNK, Recovery, RecoveryReport, check_num_places
from cluster.waits import SupersededError
from cluster.watchdog import Limits
from mpmd.errors import GroupDiedError
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.stopwatch import Stopwatch

_LOOK_SECONDS = 1.0
"""How often to look whether groups are to move."""

_SAVE_SECONDS = 10.0
"""How long a checkpoint that is being saved may keep a group on a node that is to end. Others wait for it."""

_REASONS = {
    DRAINED: "its node is to end",
    SHRUNK: "it is to share a node with others",
    GROWN: "the cluster has room for it",
}


class ElasticRuntime(RecoveringRuntime):
    """Moves groups, by itself and on request. Its arguments are those of ``RecoveringRuntime``."""

    def __init__(
        self,
        fleet: Fleet,
        connections: Sequence[Connection],
        limits: Limits,
        runtime_of: Callable[[ActorCalls], RayRuntime],
        recovery: Recovery,
        on_recovery: Callable[[RecoveryReport], None],
        max_in_flight: int = MAX_IN_FLIGHT,
    ):
        self._mover = Mover(fleet)
        self._leaving: set[int] = set()  # the groups whose nodes are to end, or that move
        self._said: dict[int | None, str] = {}  # why a group does not move
        self._wake = threading.Event()
        super().__init__(fleet, connections, limits, runtime_of, recovery, on_recovery, max_in_flight)
        watching = (weakref.ref(self), self._wake, fleet)
        threading.Thread(target=_watch, args=watching, name="mpmd places", daemon=True).start()

    def _is_failure(self, mpmd_idx: int) -> bool:
        is_leaving = mpmd_idx in self._leaving
        self._leaving.discard(mpmd_idx)
        return not is_leaving

    def resize(self, num_places: int, timeout: float) -> None:
        """Has so many groups, the first ones, have a place of their own. The others share with them.

        Blocks until they have moved, and what they have left is given back.
        Raises: ``TypeError``, ``ValueError``, and ``RuntimeError`` when there is no room within ``timeout``
          seconds; groups then move as soon as there is.
        """
        self.check_process()
        places = self._fleet.places
        check_num_places(num_places, self._num_groups)
        if num_places < self._num_groups and not places.can_share:
            raise RuntimeError(
                "resize: groups may not share devices here: the mesh was launched with "
                "Recovery(share_after=None), or on a platform whose devices belong to one process"
            )
        with self._changed:
            places.num_own = num_places
            self._wake.set()
            self._changed.wait_for(lambda: self._error is not None or self._is_settled, timeout)
            if self._error is not None:
                raise copy_of(self._error)
            if late := self._late:
                why = "".join(f"; {self._said[mpmd_idx]}" for mpmd_idx in late if mpmd_idx in self._said)
                names = ", ".join(f"group {mpmd_idx}" for mpmd_idx in late)
                raise RuntimeError(
                    f"resize({num_places}): {names} did not move within {timeout:g} s{why}. "
                    "A group moves by itself as soon as there is a place for it"
                )

    @property
    def _is_settled(self) -> bool:
        """Whether each group is where it is to be, and no move is under way: its end gives places back."""
        return not self._late and not self._is_paused

    @property
    def _late(self) -> list[int]:
        """The groups that share and are not to, or the other way round; and those that are moving."""
        places = self._fleet.places
        sharing = {p.mpmd_idx for p in self._fleet.infos if p.shares_with is not None}
        late = [i for i in range(self._num_groups) if (i in sharing) == (i < places.num_own)]
        return late or sorted(self._dead)

    def look_after(self) -> None:
        """Moves the groups that are to move, one after the other: what keeps a group's values has to stay.

        Is called now and then, by one thread.
        """
        if self._dead:
            return
        misplaced = self._mover.misplaced()
        self._leaving |= {i for i, kind in misplaced.items() if kind == DRAINED}
        for mpmd_idx, kind in misplaced.items():
            try:
                self._fleet.check_open()
                self._move(mpmd_idx, kind)
            except SupersededError:
                return
            except RuntimeError as error:  # tried again at the next look
                self._fleet.replacements.discard()
                if self._fleet.stop.is_set():  # which may be why
                    return
                self.say(f"group {mpmd_idx} does not move, though {_REASONS[kind]}: {error}", mpmd_idx)
        if not misplaced:
            self._fleet.replacements.start_spares()  # for which there was no room before

    def say(self, message: str, mpmd_idx: int | None = None) -> None:
        """Tells the user, of a group or of all, unless it is what was told last."""
        if message != self._said.get(mpmd_idx):
            self._said[mpmd_idx] = message
            print(f"cluster: {message}", file=sys.stderr, flush=True)

    def _move(self, mpmd_idx: int, kind: str) -> None:
        """Raises: ``RuntimeError`` when the group cannot move now, ``SupersededError`` after ``close``."""
        self._check_saves(kind)
        watch, attempt = Stopwatch(), self._journal.attempt
        with watch("prepared"):
            has_place = self._mover.prepare(mpmd_idx, may_use_spares=kind == DRAINED)
        if not has_place:
            raise RuntimeError("there is no other place for it")
        death = GroupDiedError(f"group {mpmd_idx} moves: {_REASONS[kind]}", mpmd_idx)
        with self._paused():
            with watch("copied"):
                self._check_saves(kind)
                self._wait_for_saves()
                if self._fleet.find_dead() - {mpmd_idx}:
                    raise RuntimeError("another group does not answer")  # and may have the only other copy
                is_copied = self._copy_all(death, attempt)
            if not is_copied:  # a group has died since: the next look shows what is to be done now
                self._fleet.replacements.discard()
                return
            self._leaving.add(mpmd_idx)
            self._recover(death, None, kind, watch)
        self._leaving.discard(mpmd_idx)
        self._said.pop(mpmd_idx, None)

    def _check_saves(self, kind: str) -> None:
        if self.is_saving and kind != DRAINED:
            raise RuntimeError("a checkpoint is being saved")

    def _wait_for_saves(self) -> None:
        deadline = time.monotonic() + _SAVE_SECONDS
        while self.is_saving and self._error is None and time.monotonic() < deadline:
            time.sleep(0.05)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Has steps, and all that groups are asked, wait."""
        with self._changed:
            self._wait_until_running()
            self._is_paused = True
        try:
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    def _copy_all(self, death: GroupDiedError, attempt: int) -> bool:
        """Waits for a snapshot of all that was asked, so that no step has to be run again.

        It counts only when a checkpoint that is being saved is written; then it is not waited for.

        Returns: whether no group has died since that attempt of the journal's has begun. Then the one that
          moves counts as dead from now on.
        """
        with self._changed:

            def has_ended() -> bool:
                return self._error is not None or bool(self._dead) or attempt != self._journal.attempt

            def await_snapshot() -> None:
                limit = 0.0 if self._journal.keeps_copies else None
                self._changed.wait_for(lambda: has_ended() or self._journal.snapshot is None, limit)

            await_snapshot()  # that is under way; steps may have been asked since it was begun
            is_free = self._journal.snapshot is None  # or a checkpoint takes long: some steps are run again
            if not has_ended() and is_free and self._journal.steps_since_snapshot:
                self._begin_snapshot()
                await_snapshot()
            if has_ended():
                return False
            self._dead[death.mpmd_idx] = death
            self._journal.suspend()
            self._changed.notify_all()
            return True


def _watch(runtime: weakref.ref[ElasticRuntime], wake: threading.Event, fleet: Fleet) -> None:
    """In a thread of its own, which does not keep the runtime alive."""
    session = RaySession()
    while True:
        wake.wait(_LOOK_SECONDS)
        wake.clear()
        if fleet.stop.is_set():
            fleet.release()  # the mesh was closed, perhaps before the last place was requested
            return
        elastic = runtime()
        if elastic is None or not session.is_connected:
            return
        try:
            elastic.look_after()
        except Exception as error:  # Ray may be shutting down; or it is out of reach for now
            if not session.is_connected:
                return
            if fleet.stop.is_set():
                continue
            elastic.say(f"the places of groups cannot be looked after: {type(error).__name__}: {error}")
        del elastic
