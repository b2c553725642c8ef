"""A runtime whose groups move to other places while a program runs: when nodes are to end, or return.

A move is a recovery from a death that was awaited: steps wait, all values are copied, other processes take
the place of the group's, and nothing has to be run again.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from cluster.actor_calls import ActorCalls
from cluster.driver import RayRuntime
from cluster.fleet import Fleet, SupersededError
from cluster.mover import Mover
from cluster.pending_calls import copy_of
from cluster.places import DRAINED, GROWN, SHRUNK
from cluster.ray_session import RaySession
from cluster.recovering_runtime import RecoveringRuntime
from cluster.recovery import Recovery, RecoveryReport, check_num_places
from cluster.watchdog import Limits
from mpmd.errors import GroupDiedError
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.runtime.requests import Handle
from mpmd.stopwatch import Stopwatch

_LOOK_SECONDS = 1.0
"""How often to look whether groups are to move."""

_SAVE_SECONDS = 10.0
"""How long a checkpoint that is being saved is waited for; then only a group whose node is to end moves."""

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
        connections: Sequence[socket.socket],
        limits: Limits,
        runtime_of: Callable[[ActorCalls], RayRuntime],
        recovery: Recovery,
        reports: list[RecoveryReport],
        max_in_flight: int = MAX_IN_FLIGHT,
    ):
        super().__init__(fleet, connections, limits, runtime_of, recovery, reports, max_in_flight)
        self._mover = Mover(fleet)
        self._moving = threading.Lock()  # one thread at a time sees which groups are to move, and moves them
        self._drained: set[int] = set()  # the groups whose nodes are to end
        self._unwritten: set[Handle] = set()  # the copies for a checkpoint that are not written yet
        self._said = ""
        watching = (weakref.ref(self), fleet.stop)
        threading.Thread(target=_watch, args=watching, name="mpmd places", daemon=True).start()

    def _is_expected(self, mpmd_idx: int) -> bool:
        is_drained = mpmd_idx in self._drained
        self._drained.discard(mpmd_idx)
        return is_drained

    def copy_out(self, mpmd_idx: int, copy: Handle, handles: Sequence[Handle]) -> Future[None]:
        self._unwritten.add(copy)
        return super().copy_out(mpmd_idx, copy, handles)

    def free(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        self._unwritten.discard(handle)
        super().free(mpmd_idxs, handle)

    def resize(self, num_places: int, timeout: float) -> None:
        """Has so many groups, the first ones, have a place of their own. The others share with them.

        Blocks until they have moved.
        Raises: ``TypeError``, ``ValueError``, and ``RuntimeError`` when there is no room within ``timeout``
          seconds; groups then move as soon as there is.
        """
        self.check_process()
        check_num_places(num_places, self._num_groups)
        self._fleet.places.num_own = num_places
        deadline = time.monotonic() + timeout
        while True:
            with self._moving:
                self._check_error()
                self._move_misplaced()
                late = [p.mpmd_idx for p in self._fleet.infos if self._has_other_place(p.mpmd_idx)]
            if not late:
                return
            if time.monotonic() >= deadline:
                names = ", ".join(f"group {mpmd_idx}" for mpmd_idx in dict.fromkeys(late))
                raise RuntimeError(
                    f"resize({num_places}): {names} cannot move within {timeout:g} s: {self._said}. "
                    "A group moves by itself when the cluster has room for it"
                )
            time.sleep(min(_LOOK_SECONDS, timeout / 10))

    def _has_other_place(self, mpmd_idx: int) -> bool:
        """Whether a group shares and is not to, or the other way round."""
        places = self._fleet.places
        shares = any(number in places.shares_with for number in places.numbers_of(mpmd_idx))
        return shares == (mpmd_idx < places.num_own)

    def _check_error(self) -> None:
        with self._changed:
            self._wait_until_running()
            if self._error is not None:
                raise copy_of(self._error)

    def look_after(self) -> None:
        """Moves the groups that are to move. Is called now and then."""
        if self._dead or not self._moving.acquire(blocking=False):
            return
        try:
            self._move_misplaced()
        finally:
            self._moving.release()

    def _move_misplaced(self) -> None:
        """One group after the other, so that the one that keeps its values is there."""
        misplaced = self._mover.misplaced()
        self._drained |= {i for i, kind in misplaced.items() if kind == DRAINED}
        for mpmd_idx, kind in misplaced.items():
            try:
                self._move(mpmd_idx, kind)
            except SupersededError:
                return
            except RuntimeError as error:  # tried again at the next look
                self._fleet.replacements.discard()
                self.say(f"group {mpmd_idx} does not move: {error}")

    def say(self, message: str) -> None:
        """Tells the user, unless it is what was told before."""
        if message != self._said:
            self._said = message
            print(f"cluster: {message}", file=sys.stderr, flush=True)

    def _move(self, mpmd_idx: int, kind: str) -> None:
        watch = Stopwatch()
        with watch("prepared"):
            is_wanted = self._mover.prepare(mpmd_idx, may_use_spares=kind == DRAINED)
        if not is_wanted:
            self.say(f"the node of group {mpmd_idx} is to end, and there is no other place for it")
            return
        death = GroupDiedError(f"group {mpmd_idx} moves: {_REASONS[kind]}", mpmd_idx)
        with self._paused():
            with watch("copied"):
                self._wait_for_saves(kind)
                is_copied = self._copy_all(death)
            if not is_copied:  # another group has died: this one is replaced, or moves at the next look
                self._fleet.replacements.discard()
                return
            self._recover(death, None, kind, watch)
        self._drained.discard(mpmd_idx)

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

    def _wait_for_saves(self, kind: str) -> None:
        deadline = time.monotonic() + _SAVE_SECONDS
        while self._unwritten and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._unwritten and kind != DRAINED:
            raise RuntimeError("a checkpoint is being saved")

    def _copy_all(self, death: GroupDiedError) -> bool:
        """Waits for a snapshot of all that was asked, so that no step has to be run again.

        Returns: whether no group has died meanwhile. Then the one that moves counts as dead from now on.
        """
        with self._changed:
            for _ in range(2):  # one may be under way, and steps were asked since
                self._changed.wait_for(lambda: self._error or self._dead or self._journal.snapshot is None)
                if not (self._error or self._dead) and self._journal.steps_since_snapshot:
                    self._begin_snapshot()
            self._changed.wait_for(lambda: self._error or self._dead or self._journal.snapshot is None)
            if self._error is not None or self._dead:
                return False
            self._dead[death.mpmd_idx] = death
            self._journal.suspend()
            self._changed.notify_all()
            return True


def _watch(runtime: weakref.ref[ElasticRuntime], stop: threading.Event) -> None:
    """In a thread of its own, which does not keep the runtime alive."""
    session = RaySession()
    while not stop.wait(_LOOK_SECONDS) and session.is_connected:
        elastic = runtime()
        if elastic is None:
            return
        try:
            elastic.look_after()
        except Exception as error:  # Ray may be shutting down; or it is out of reach for now
            if not session.is_connected or stop.is_set():
                return
            elastic.say(f"the places of groups cannot be looked after: {type(error).__name__}: {error}")
        del elastic
