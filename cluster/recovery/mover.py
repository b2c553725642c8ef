"""Moves groups to other nodes or devices while steps run: when nodes are to end, or return, or on request.

A move is a recovery from a death that was awaited: steps wait, all values are copied, other processes take
the place of the group's, and nothing has to be run again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Iterator

from cluster.driver.calls.pending_calls import copy_of
from cluster.driver.ray_session import RaySession
from cluster.recovery.liveness_waiter import SupersededError
from cluster.recovery.migrations import Migrations
from cluster.recovery.process_pool import ProcessPool
from cluster.recovery.replacer import Replacer
from cluster.recovery.report import DRAINED, GROWN, SHRUNK
from cluster.recovery.requests import Requests
from cluster.recovery.saving import Saving
from cluster.recovery.snapshots import Snapshots
from mpmd.errors import GroupDiedError
from mpmd.util.stopwatch import Stopwatch

_LOOK_SECONDS = 1.0
"""The seconds between two looks whether groups are to move."""

_SAVE_SECONDS = 10.0
"""The seconds for which saving a checkpoint may keep a group on a node that is to end. Others wait for it."""

_REASONS = {
    DRAINED: "its node is to end",
    SHRUNK: "it is to share a node with others",
    GROWN: "the cluster has room for it",
}


class Mover:
    """Moves groups, by itself and on request.

    Args:
      requests, snapshots, saving: what groups were asked.
      replacer: replaces a group when its values are copied.
    """

    def __init__(self, requests: Requests, snapshots: Snapshots, saving: Saving, replacer: Replacer):
        self._requests = requests
        self._pool = requests.pool
        self._snapshots = snapshots
        self._saving = saving
        self._replacer = replacer
        self._migrations = Migrations(self._pool)
        self._said: dict[int | None, str] = {}  # why a group does not move
        self._wake = threading.Event()

    def start(self) -> None:
        """Has a thread look after the groups, as long as the mover is in use."""
        watching = (weakref.ref(self), self._wake, self._pool)
        threading.Thread(target=_watch, args=watching, name="mpmd places", daemon=True).start()

    def resize(self, num_places: int, timeout: float) -> None:
        """Has the processes of the first ``num_places`` groups have reservations. The others share with them.

        Blocks until they have moved, and what they have left is given back.
        Args:
          num_places: from 1 to the number of groups.

        Raises: ``RuntimeError`` when there is no room within ``timeout`` seconds; groups then move as soon as
          there is.
        """
        requests, allocations = self._requests, self._pool.allocations
        if num_places < requests.num_groups and not allocations.can_share:
            raise RuntimeError(
                "resize: groups may not share devices here: the mesh was launched with "
                "Recovery(share_after=None), or on a platform whose devices belong to one process"
            )
        with requests.changed:
            allocations.num_own = num_places
            self._wake.set()
            requests.changed.wait_for(lambda: requests.error is not None or self._is_settled, timeout)
            if requests.error is not None:
                raise copy_of(requests.error)
            if late := self._late:
                why = "".join(f"; {self._said[mpmd_idx]}" for mpmd_idx in late if mpmd_idx in self._said)
                names = ", ".join(f"group {mpmd_idx}" for mpmd_idx in late)
                raise RuntimeError(
                    f"resize({num_places}): {names} did not move within {timeout:g} s{why}. "
                    "A group moves by itself as soon as there is a place for it"
                )

    @property
    def _is_settled(self) -> bool:
        """Whether each group is where it is to be, and no move is under way: its end gives resources back."""
        return not self._late and not self._requests.is_paused

    @property
    def _late(self) -> list[int]:
        """The groups that share and are not to, or the other way round; and those that are moving."""
        allocations = self._pool.allocations
        sharing = {p.mpmd_idx for p in self._pool.infos if p.shares_with is not None}
        late = [i for i in range(self._requests.num_groups) if (i in sharing) == (i < allocations.num_own)]
        return late or sorted(self._requests.dead)

    def look_after(self) -> None:
        """Moves the groups that are to move, one after the other: what keeps a group's values has to stay.

        Is called now and then, by one thread.
        """
        if self._requests.dead:
            return
        groups_to_move = self._migrations.groups_to_move()
        self._replacer.leaving |= {i for i, kind in groups_to_move.items() if kind == DRAINED}
        for mpmd_idx, kind in groups_to_move.items():
            try:
                self._pool.check_open()
                self._move(mpmd_idx, kind)
            except SupersededError:
                return
            except RuntimeError as error:  # tried again at the next look
                self._pool.replacements.discard()
                if self._pool.stop.is_set():  # which may be why
                    return
                self.say(f"group {mpmd_idx} does not move, though {_REASONS[kind]}: {error}", mpmd_idx)
        if not groups_to_move:
            self._pool.replacements.start_spares()  # for which there was no room before

    def say(self, message: str, mpmd_idx: int | None = None) -> None:
        """Tells the user, of a group or of all, unless it is what was told last."""
        if message != self._said.get(mpmd_idx):
            self._said[mpmd_idx] = message
            print(f"cluster: {message}", file=sys.stderr, flush=True)

    def _move(self, mpmd_idx: int, kind: str) -> None:
        """Raises: ``RuntimeError`` when the group cannot move now, ``SupersededError`` after ``close``."""
        self._check_saves(kind)
        watch, attempt = Stopwatch(), self._requests.journal.attempt
        with watch("prepared"):
            has_allocation = self._migrations.prepare(mpmd_idx, may_use_spares=kind == DRAINED)
        if not has_allocation:
            raise RuntimeError("there is no other place for it")
        death = GroupDiedError(f"group {mpmd_idx} moves: {_REASONS[kind]}", mpmd_idx)
        with self._paused():
            with watch("copied"):
                self._check_saves(kind)
                self._wait_for_saves()
                if self._pool.find_dead() - {mpmd_idx}:
                    raise RuntimeError("another group does not answer")  # and may have the only other copy
                is_copied = self._copy_all(death, attempt)
            if not is_copied:  # a group has died since: the next look shows what is to be done now
                self._pool.replacements.discard()
                return
            self._replacer.leaving.add(mpmd_idx)
            self._replacer.replace(death, kind=kind, watch=watch)
        self._replacer.leaving.discard(mpmd_idx)
        self._said.pop(mpmd_idx, None)

    def _check_saves(self, kind: str) -> None:
        if self._saving.is_under_way and kind != DRAINED:
            raise RuntimeError("a checkpoint is being saved")

    def _wait_for_saves(self) -> None:
        deadline = time.monotonic() + _SAVE_SECONDS
        while self._saving.is_under_way and self._requests.error is None and time.monotonic() < deadline:
            time.sleep(0.05)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Has steps, and all that groups are asked, wait."""
        requests = self._requests
        with requests.changed:
            requests.wait_until_running()
            requests.is_paused = True
        try:
            yield
        finally:
            with requests.changed:
                requests.is_paused = False
                requests.changed.notify_all()

    def _copy_all(self, death: GroupDiedError, attempt: int) -> bool:
        """Waits for a snapshot of all that was asked, so that no step has to be run again.

        It counts only when a checkpoint that is being saved is written; then it is not waited for.

        Returns: whether no group has died since that attempt of the journal's has begun. Then the one that
          moves counts as dead from now on.
        """
        requests, journal = self._requests, self._requests.journal
        with requests.changed:

            def has_ended() -> bool:
                return requests.error is not None or bool(requests.dead) or attempt != journal.attempt

            def await_snapshot() -> None:
                limit = 0.0 if journal.keeps_copies else None
                requests.changed.wait_for(lambda: has_ended() or journal.snapshot is None, limit)

            await_snapshot()  # that is under way; steps may have been asked since it was begun
            # Or a checkpoint takes long, or the snapshot has failed: then some steps are run again.
            is_free = journal.snapshot is None
            if not has_ended() and is_free and journal.steps_since_snapshot:
                self._snapshots.begin()
                await_snapshot()
            if has_ended():
                return False
            requests.dead[death.mpmd_idx] = death
            journal.suspend()
            requests.changed.notify_all()
            return True


def _watch(mover: weakref.ref[Mover], wake: threading.Event, pool: ProcessPool) -> None:
    """In a thread of its own, which does not keep the mover alive."""
    session = RaySession()
    while True:
        wake.wait(_LOOK_SECONDS)
        wake.clear()
        if pool.stop.is_set():
            pool.release()  # the mesh was closed, perhaps before the last reservation was requested
            return
        alive = mover()
        if alive is None or not session.is_connected:
            return
        try:
            alive.look_after()
        except Exception as error:  # Ray may be shutting down; or it is out of reach for now
            if not session.is_connected:
                return
            if pool.stop.is_set():
                continue
            alive.say(f"the places of groups cannot be looked after: {type(error).__name__}: {error}")
        del alive
