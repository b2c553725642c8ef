"""Processes that take over from dead processes, or from processes that move."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import ray
from ray.actor import ActorHandle

from cluster.driver.calls.watchdog import NO_LIMITS
from cluster.driver.ray_session import RaySession
from cluster.protocol.process_info import ProcessInfo
from cluster.recovery.allocations import Allocations
from cluster.recovery.liveness_waiter import LivenessWaiter, Pings
from cluster.start.actors import ActorStarter
from cluster.start.connect import ProcessLostError, late_error
from cluster.start.resources import Allocation, Reservation, SharedDevices

_ANSWER_SECONDS = 5.0
"""A spare, or a process that was prepared, that does not answer within this time is not used."""

_COUNT_SECONDS = 1.0
"""A spare that does not answer within this time does not count as ready."""


class _Spare(NamedTuple):
    """A started process that takes the place of a dead one.

    Attributes:
      started: the call that ends when it is ready.
      waiter, pings: with which it is pinged.
    """

    actor: ActorHandle
    allocation: Reservation
    started: ray.ObjectRef
    waiter: LivenessWaiter
    pings: Pings

    def is_lost(self) -> bool:
        """Whether the process has died or does not answer; while it starts, only whether it has died."""
        if not ray.wait([self.started], timeout=0)[0]:
            return False
        try:
            self.waiter.check_alive([0], self.pings)
        except ProcessLostError:
            return True
        return not _has_succeeded(self.started)


class Replacements:
    """Replaces dead or moving processes by prepared processes, spares, or new processes.

    Args:
      starter: starts processes.
      allocations: the allocations of all processes; kept up to date.
      spares: the allocations of the spare processes.
    """

    def __init__(self, starter: ActorStarter, allocations: Allocations, spares: Sequence[Reservation]):
        self.starter = starter
        self.allocations = allocations
        allocations.placement_groups.update(allocation.placement_group for allocation in spares)
        self._num_spares = len(spares)
        self._free = list(spares)
        self._lock = threading.Lock()
        self._spares: list[_Spare] = []
        self._prepared: dict[int, tuple[ActorHandle, Allocation]] = {}
        self._session = RaySession()

    # Spares.

    def start_spares(self) -> None:
        """Starts spares in place of lost spares, and gives back unused resources. Does not wait.

        While groups wait for room, no spare is started.
        """
        with self._lock:
            for spare in [spare for spare in self._spares if spare.is_lost()]:
                self._drop(spare)
            good = self.allocations.good_nodes() if self._free else frozenset()
            while len(self._spares) < self._num_spares and not self.allocations.is_short:
                allocation = self._free.pop() if self._free else None
                if allocation is None or self.allocations.node_of(allocation) not in good:
                    allocation = self.allocations.request_spare(self.starter.resources[0].bundle)
                actor = self.starter.start(0, allocation)
                waiter = LivenessWaiter([actor], self.starter.endpoints[:1], NO_LIMITS)
                self._spares.append(_Spare(actor, allocation, actor.warm_up.remote(), waiter, {}))
            self._free.clear()
            prepared = [allocation for _, allocation in self._prepared.values()]
            self.allocations.give_back([*prepared, *(spare.allocation for spare in self._spares)])

    def _drop(self, spare: _Spare) -> None:
        """Ends a spare that is of no use; another spare may start in its reservation."""
        self._spares.remove(spare)
        self._free.append(spare.allocation)
        self._session.kill(spare.actor)

    def await_spares(self, timeout: float) -> None:
        """Waits until the spares are ready. Raises ``RuntimeError`` when they are not in time."""
        starting = [spare.started for spare in self._spares]
        _, late = ray.wait(starting, num_returns=len(starting), timeout=timeout) if starting else ([], [])
        if late:
            title = f"{len(late)} spare processes did not start within {timeout:g} s"
            spares = {
                f"spare {i}": spare.actor for i, spare in enumerate(self._spares) if spare.started in late
            }
            raise late_error(title, spares)
        ray.get(starting)

    def count_ready_spares(self) -> int:
        """The number of spares that could replace a process now: they answer within a second."""
        spares, good = list(self._spares), self.allocations.good_nodes()
        asked: list[ray.ObjectRef] = [
            spare.actor.health.remote() for spare in spares if self._is_ready(spare, good)
        ]
        return sum(_has_succeeded(call, _COUNT_SECONDS) for call in asked)

    def _is_ready(self, spare: _Spare, good: Collection[str]) -> bool:
        return _has_succeeded(spare.started) and self.allocations.node_of(spare.allocation) in good

    def _take_spare(self) -> tuple[ActorHandle, Reservation] | None:
        good = self.allocations.good_nodes() if self._spares else frozenset()
        for spare in [spare for spare in self._spares if self._is_ready(spare, good)]:
            if _is_alive(spare.actor):
                self._spares.remove(spare)
                return spare.actor, spare.allocation
            self._drop(spare)
        return None

    # Moves.

    def prepare(self, allocations: Mapping[int, Allocation], timeout: float) -> None:
        """Starts processes that are to replace running ones, and waits until they are up.

        Raises: ``RuntimeError`` when that takes longer than ``timeout`` seconds, or a process cannot start.
        """
        started = {
            number: self.starter.start(number, allocation) for number, allocation in allocations.items()
        }
        with self._lock:
            self._prepared |= {number: (actor, allocations[number]) for number, actor in started.items()}
        try:
            ray.get([actor.warm_up.remote() for actor in started.values()], timeout=timeout)
        except ray.exceptions.RayError as error:
            self.discard()
            raise RuntimeError(f"the processes that were to take over did not start: {error}") from error

    def discard(self) -> None:
        """Ends the processes that were prepared and not used."""
        with self._lock:
            prepared, self._prepared = self._prepared, {}
        for actor, _ in prepared.values():
            self._session.kill(actor)

    # Replacing.

    def replace(
        self,
        numbers: Sequence[int],
        infos: Sequence[ProcessInfo],
        check: Callable[[], None],
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
                taken = self._prepared.pop(number, None)
                taken = taken if taken is not None and _is_alive(taken[0]) else self._take_spare()
                if taken is not None:
                    actors[number], allocation = taken
                    actors[number].adopt.remote(self.starter.endpoints[number])
                    self._leave(number, allocation)
            start = time.monotonic()
            for mpmd_idx in sorted({self.starter.endpoints[n].mpmd_idx for n in numbers if n not in actors}):
                waited = time.monotonic() - start  # for the groups before, and for this one as well
                allocations = self.allocations.find(mpmd_idx, infos, numbers, check=check, waited=waited)
                for number in allocations.keys() - actors.keys():
                    self._leave(number, allocations[number])
                    actors[number] = self.starter.start(number, allocations[number])
            return actors

    def _leave(self, number: int, allocation: Allocation) -> None:
        """Assigns another allocation to a process; a spare may start in its former reservation."""
        before = self.allocations.of(number)
        if isinstance(before, Reservation) and before != allocation:
            self._free.append(before)
        self.allocations.assign(number, allocation)

    def placed(self, number: int, info: ProcessInfo) -> ProcessInfo:
        """The record of a process, completed by the group with which it shares."""
        allocation = self.allocations.of(number)
        group = None
        if isinstance(allocation, SharedDevices):
            group = self.starter.endpoints[allocation.host].mpmd_idx
        return dataclasses.replace(info, shares_with=group)


def _is_alive(actor: ActorHandle) -> bool:
    return _has_succeeded(actor.health.remote(), _ANSWER_SECONDS)


def _has_succeeded(call: ray.ObjectRef, timeout: float = 0.0) -> bool:
    """Whether a call is answered, within some seconds, and by no error."""
    if not ray.wait([call], timeout=timeout)[0]:
        return False
    try:
        ray.get(call)
    except ray.exceptions.RayError:
        return False
    return True
