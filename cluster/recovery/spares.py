"""Processes that stand by: spares, and processes that were started for a move, until they have a group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import ray
from ray.actor import ActorHandle

from cluster.driver.calls import liveness
from cluster.driver.calls.liveness import NO_LIMITS, TimeLimits
from cluster.driver.ray_session import RaySession
from cluster.protocol.process_info import ProcessInfo
from cluster.recovery.allocations import Allocations
from cluster.start.actors import ActorStarter
from cluster.start.connect import late_error
from cluster.start.resources import Allocation, Reservation

_ANSWER_SECONDS = 5.0
"""A process that stands by and does not answer within this time is not used."""

_COUNT_SECONDS = 1.0
"""A spare that does not answer within this time does not count as ready."""


class Process:
    def __init__(self, actor: ActorHandle):
        self.actor = actor
        self._ping: tuple[float, ray.ObjectRef] | None = None  # that is not answered, and when it was made
        self._notice: ray.ObjectRef | None = None

    def loss(self, limits: TimeLimits = NO_LIMITS) -> str | None:
        """Pings the process, and reads the answer to the ping before.

        Returns: how the process is lost: it has died, does not answer, or exceeds the limits; else ``None``.
        """
        now = time.monotonic()
        since, ping = self._ping or (now, self.actor.health.remote())
        self._ping = since, ping
        if not ray.wait([ping], timeout=0)[0]:
            is_silent = now - since > liveness.UNRESPONSIVE_SECONDS
            return f"has not answered for {now - since:.0f} s" if is_silent else None
        self._ping = None
        try:
            doing = ray.get(ping)
        except ray.exceptions.RayError as error:  # as in ``Processes.find_dead``
            return f"has died: {error}"
        is_recent = now - since <= liveness.PING_SECONDS  # the wait that has pinged may have ended long ago
        return f"is stuck: it is {doing}" if is_recent and limits.exclude(doing) else None

    def forget_ping(self) -> None:
        """The wait that has pinged is over: how long another wait may take counts from its own pings."""
        self._ping = None

    def answers(self, timeout: float) -> bool:
        return has_succeeded(self.actor.health.remote(), timeout)

    def is_told_to_end(self) -> bool:
        """Whether the process has got SIGTERM, and still runs."""
        self._notice = notice = self._notice or self.actor.await_notice.remote()
        if not ray.wait([notice], timeout=0)[0]:
            return False
        if not has_succeeded(notice):  # dead, or out of reach: asked again, until it is replaced
            self._notice = None
            return False
        return True


def has_succeeded(call: ray.ObjectRef, timeout: float = 0.0) -> bool:
    if not ray.wait([call], timeout=timeout)[0]:
        return False
    try:
        ray.get(call)
    except ray.exceptions.RayError:
        return False
    return True


class _Standby(Process):
    """A process in its allocation, which takes devices as soon as it has started."""

    def __init__(self, actor: ActorHandle, allocation: Allocation):
        super().__init__(actor)
        self.allocation = allocation
        self.started: ray.ObjectRef = actor.warm_up.remote()

    @property
    def has_started(self) -> bool:
        return has_succeeded(self.started)

    @property
    def is_lost(self) -> bool:
        """Whether the process has died or does not answer; while it starts, only whether it has died."""
        return bool(ray.wait([self.started], timeout=0)[0]) and (
            self.loss() is not None or not self.has_started
        )


class Spares:
    """Has processes stand by, and replaces processes that have ended by these, or by new processes."""

    def __init__(self, starter: ActorStarter, allocations: Allocations, reservations: Sequence[Reservation]):
        self.starter = starter
        self.allocations = allocations
        allocations.placement_groups.update(each.placement_group for each in reservations)
        self._num_spares = len(reservations)
        self._free: list[Allocation] = list(reservations)
        self._lock = threading.Lock()
        self._spares: list[_Standby] = []
        self._prepared: dict[int, _Standby] = {}  # by the number of the process that moves
        self._session = RaySession()

    def start_missing(self) -> None:
        """Starts spares in place of lost spares, and gives back unused resources. Does not wait.

        While groups wait for room, no spare is started.
        """
        with self._lock:
            for spare in [spare for spare in self._spares if spare.is_lost]:
                self._drop(spare)
            good = self.allocations.good_nodes() if self._free else frozenset()
            while len(self._spares) < self._num_spares and not self.allocations.is_short:
                allocation = self._free.pop() if self._free else None
                if allocation is None or self.allocations.node_of(allocation) not in good:
                    allocation = self.allocations.request_spare(self.starter.bundles[0])
                self._spares.append(_Standby(self.starter.start(0, allocation), allocation))
            self._free.clear()
            standing_by = [*self._spares, *self._prepared.values()]
            self.allocations.give_back([each.allocation for each in standing_by])

    def _drop(self, spare: _Standby) -> None:
        """Ends a spare that is of no use; another spare may start in its reservation."""
        self._spares.remove(spare)
        self._free.append(spare.allocation)
        self._session.kill(spare.actor)

    def await_start(self, timeout: float) -> None:
        starting = [spare.started for spare in self._spares]
        _, late = ray.wait(starting, num_returns=len(starting), timeout=timeout) if starting else ([], [])
        if late:
            title = f"{len(late)} spare processes did not start within {timeout:g} s"
            spares = enumerate(self._spares)
            raise late_error(title, {f"spare {i}": each.actor for i, each in spares if each.started in late})
        ray.get(starting)

    def count_ready(self) -> int:
        return sum(spare.answers(_COUNT_SECONDS) for spare in self._ready())

    def _ready(self) -> list[_Standby]:
        spares = list(self._spares)  # another thread may take one meanwhile
        good = self.allocations.good_nodes() if spares else frozenset()
        node_of = self.allocations.node_of
        return [each for each in spares if each.has_started and node_of(each.allocation) in good]

    def prepare(self, allocations: Mapping[int, Allocation], timeout: float) -> None:
        """Starts processes that are to replace running ones, and waits until they are up.

        Raises: ``RuntimeError`` when that takes longer than ``timeout`` seconds, or a process cannot start.
        """
        started = {n: _Standby(self.starter.start(n, each), each) for n, each in allocations.items()}
        with self._lock:
            self._prepared |= started
        try:
            ray.get([process.started for process in started.values()], timeout=timeout)
        except ray.exceptions.RayError as error:
            self.discard()
            raise RuntimeError(f"the processes that were to take over did not start: {error}") from error

    def discard(self) -> None:
        with self._lock:
            prepared, self._prepared = self._prepared, {}
        for process in prepared.values():
            self._session.kill(process.actor)

    def take_over(
        self, numbers: Sequence[int], infos: Sequence[ProcessInfo], check: Callable[[], None]
    ) -> dict[int, ActorHandle]:
        """Finds another actor for each process of ``numbers`` that has ended: prepared, a spare, or new.

        Args:
          infos: where all processes are, or have been.
          check: is called now and then while this waits for an allocation, and raises to wait no longer.

        Raises: ``NoAllocationError``.
        """
        with self._lock:
            actors: dict[int, ActorHandle] = {}
            for number in numbers:
                if (process := self._take_standby(number)) is not None:
                    process.actor.adopt.remote(self.starter.endpoints[number])
                    self._leave(number, process.allocation)
                    actors[number] = process.actor
            start = time.monotonic()
            for mpmd_idx in sorted({self.starter.endpoints[n].mpmd_idx for n in numbers if n not in actors}):
                waited = time.monotonic() - start  # for the groups before, and for this one as well
                allocations = self.allocations.find(mpmd_idx, infos, numbers, check=check, waited=waited)
                for number in allocations.keys() - actors.keys():
                    self._leave(number, allocations[number])
                    actors[number] = self.starter.start(number, allocations[number])
            return actors

    def _take_standby(self, number: int) -> _Standby | None:
        prepared = self._prepared.pop(number, None)
        if prepared is not None and prepared.answers(_ANSWER_SECONDS):
            return prepared
        for spare in self._ready():
            if spare.answers(_ANSWER_SECONDS):
                self._spares.remove(spare)
                return spare
            self._drop(spare)
        return None

    def _leave(self, number: int, allocation: Allocation) -> None:
        """Assigns another allocation to a process; a spare may start in its former reservation."""
        before = self.allocations.of(number)
        if isinstance(before, Reservation) and before != allocation:
            self._free.append(before)
        self.allocations.assign(number, allocation)
