"""The processes of a mesh that recovers, while it is open: who is alive, who takes over, who has to move.

Methods block until their work is done, and raise when another process dies meanwhile, or ``stop`` was set.
``find_dead`` then tells which.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import ray
from ray.actor import ActorHandle

from cluster.driver.calls import liveness
from cluster.driver.calls.actor_calls import ActorCalls
from cluster.driver.calls.liveness import NO_LIMITS, TimeLimits
from cluster.driver.ray_session import RaySession
from cluster.driver.runtime import LoadRequests
from cluster.protocol.versions import versions_here
from cluster.recovery.allocations import PROMPT_SECONDS
from cluster.recovery.report import DRAINED, REPLACED
from cluster.recovery.spares import Process, Spares
from cluster.start.connect import Connected, StartingActors, connect, open_groups
from cluster.start.resources import SharedDevices
from cluster.tcp.connection import Connection
from mpmd.errors import MESH_CLOSED, GroupDiedError

_POLL_SECONDS = 0.25

_AVOID_SECONDS = 300.0
"""A node of which a process was told to end, and that is still there after this time, is not about to end."""

Calls = dict[ray.ObjectRef, int]
"""Calls of Ray that are under way, and the number of the process that each is made on."""


class SupersededError(RuntimeError):
    """The operation under way is not to go on."""


class Processes:
    """The running processes, by their numbers.

    Args:
      spares: has processes stand by in the allocations of the actors.
      started: the actor of each process, and the seconds that a process may take to start, and to connect.
      connected: where the processes run, which is kept up to date; and the edges over which values are
        gathered, as loaded programs know them.
      transport, encryption: the arguments of ``launch``.
      limits: when another process has died, a process that is in one task for longer counts as dead as well.

    Attributes:
      stop: is set when the mesh is closed, to end all waits.
    """

    def __init__(
        self,
        spares: Spares,
        started: StartingActors,
        connected: Connected,
        transport: str,
        encryption: bool | None,
        limits: TimeLimits,
    ):
        self.spares = spares
        self.allocations = spares.allocations
        self.endpoints = spares.starter.endpoints
        self.infos = list(connected.placement.processes)
        self.stop = threading.Event()
        self._processes = [Process(actor) for actor in started.actors]
        self._placement = connected.placement
        self._transport = transport
        self._encryption = encryption
        self._topology = connected.topology
        self._timeout = started.timeout
        self._limits = limits
        self._session = RaySession()
        self._resetting: Calls = {}  # of processes that are not new
        self._avoided: dict[str, float] = {}  # nodes, and since when

    @property
    def actors(self) -> list[ActorHandle]:
        return [process.actor for process in self._processes]

    def calls(
        self, connections: Sequence[Connection], on_death: Callable[[GroupDiedError], object]
    ) -> ActorCalls:
        placement_groups = self.allocations.placement_groups
        return ActorCalls(
            self.actors, self.endpoints, placement_groups, connections, self.infos, self._limits, on_death
        )

    # Waits, and deaths.

    def check_open(self) -> None:
        if self.stop.is_set():
            raise SupersededError(MESH_CLOSED)

    def check_alive(self, numbers: Iterable[int], limits: TimeLimits = NO_LIMITS) -> None:
        """Raises ``GroupDiedError`` when a process has died, does not answer, or exceeds the limits."""
        for number in numbers:
            if (loss := self._processes[number].loss(limits)) is not None:
                endpoint = self.endpoints[number]
                raise GroupDiedError(f"{endpoint.name} {loss}", endpoint.mpmd_idx)

    def wait_for(
        self,
        calls: Calls,
        is_wanted: Callable[[], bool] = lambda: True,
        fetch: bool = True,
        limits: TimeLimits = NO_LIMITS,
    ) -> None:
        """Waits for calls while the called processes live, and raises the errors of the calls.

        An error of a call does not tell whose death has caused it; ``find_dead`` does.

        Args:
          is_wanted: whether to go on waiting.
          fetch: ``False`` for results that are for an actor and not for the driver; that actor raises their
            errors.
          limits: how long a called process may be in one task meanwhile.
        """
        waiting = list(calls)
        for number in {*calls.values()}:
            # The ping of an earlier wait may stand behind a call that was given up: Ray delivers in order.
            self._processes[number].forget_ping()
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=_POLL_SECONDS, fetch_local=False)
            if self.stop.is_set() or not is_wanted():
                raise SupersededError(f"{MESH_CLOSED}, or a group has died")
            if fetch:
                ray.get(ready)
            if not ready:
                self.check_alive({calls[call] for call in waiting}, limits)

    def find_dead(self) -> set[int]:
        """The groups of which a process is gone, does not answer, or is stuck."""
        pings: list[ray.ObjectRef] = [actor.health.remote() for actor in self.actors]
        ray.wait(pings, num_returns=len(pings), timeout=liveness.PING_SECONDS)
        pinged = zip(self.endpoints, pings, strict=True)
        return {endpoint.mpmd_idx for endpoint, ping in pinged if not self._is_well(ping)}

    def _is_well(self, ping: ray.ObjectRef) -> bool:
        try:
            return not self._limits.exclude(ray.get(ping, timeout=0))
        except ray.exceptions.RayError:  # also if the memory of its node ran out, which is no RayActorError
            return False

    # Replacing, in the order of the steps.

    def kill(self, groups: Collection[int]) -> list[int]:
        gone = self._numbers_of(groups)
        for number in gone:
            self._session.kill(self.actors[number])
        self._resetting = {call: n for call, n in self._resetting.items() if n not in gone}
        return gone

    def reset(self, but: Collection[int], programs: Sequence[int]) -> None:
        """Has the processes of all groups except ``but`` end their connections. Does not wait for the end.

        They keep ``programs``, and drop programs that some processes have not loaded.
        """
        self._resetting = {}
        for number in self._numbers_of(set(range(len(self.infos))) - set(but)):
            actor = self.actors[number]
            self._resetting[actor.interrupt.remote()] = number
            self._resetting[actor.reset.remote(programs)] = number

    def start(self, groups: Collection[int]) -> None:
        """Starts new processes for ``groups``, whose processes have ended. May wait for room."""
        gone = self._numbers_of(groups)
        for number, actor in self.spares.take_over(gone, self.infos, self.check_open).items():
            self._processes[number] = Process(actor)

    def open(self, groups: Collection[int]) -> None:
        def check() -> None:
            self.check_open()
            if gone := self.allocations.without_node().difference(self._resetting.values()):
                raise RuntimeError(f"the node of process {min(gone)} is gone")

        numbers = self._numbers_of(groups)
        opened = open_groups(self._starting(numbers, check), versions_here())
        for number, info in zip(numbers, opened, strict=True):
            allocation = self.allocations.of(number)
            host = None
            if isinstance(allocation, SharedDevices):
                host = self.endpoints[allocation.host].mpmd_idx
            self.infos[number] = dataclasses.replace(info, shares_with=host)

    def await_reset(self) -> None:
        """Waits for the processes that are reset; nobody else watches the steps that they end now."""
        self.wait_for(self._resetting, limits=self._limits)
        self._resetting = {}

    def _numbers_of(self, groups: Collection[int]) -> list[int]:
        return [number for number, each in enumerate(self.endpoints) if each.mpmd_idx in groups]

    def _starting(self, numbers: Sequence[int], check: Callable[[], None]) -> StartingActors:
        actors, endpoints = [self.actors[i] for i in numbers], [self.endpoints[i] for i in numbers]
        return StartingActors(actors, endpoints, self._timeout, check)

    def connect(self) -> list[Connection]:
        """Connects all processes with one another and the driver. Returns the driver's connections."""
        numbers = range(len(self.infos))

        def check() -> None:
            self.check_open()
            self.check_alive(numbers)

        connected = connect(
            self._starting(numbers, check), self.infos, self._transport, self._encryption, self._topology
        )
        placement = connected.placement
        self._placement.processes, self._placement.transports = placement.processes, placement.transports
        return connected.connections

    def load(self, groups: Collection[int], loads: Mapping[int, LoadRequests]) -> None:
        """Has the processes of ``groups`` load their programs, in ascending order of program numbers."""
        programs = [
            (i, program, requests)
            for i in self._numbers_of(groups)
            for program, requests in sorted(loads.items())
            if self.endpoints[i].mpmd_idx in requests.by_group
        ]
        actors = self.actors
        self.wait_for(
            {actors[i].ship.remote(program, requests.shipment): i for i, program, requests in programs}
        )
        loading: Calls = {}
        for i, _, requests in programs:
            for request in requests.by_group[self.endpoints[i].mpmd_idx]:
                loading[actors[i].answer.remote(request)] = i
        self.wait_for(loading, limits=self._limits)

    # Moves.

    def groups_to_move(self) -> dict[int, str]:
        now = time.monotonic()
        for number in self._told_to_end():
            self._avoided.setdefault(self.infos[number].node_id, now)
        self._avoided = {node: since for node, since in self._avoided.items() if now - since < _AVOID_SECONDS}
        self.allocations.avoided = frozenset(self._avoided)
        return self.allocations.groups_to_move()

    def _told_to_end(self) -> set[int]:
        return {number for number, process in enumerate(self._processes) if process.is_told_to_end()}

    def prepare_move(self, mpmd_idx: int, kind: str) -> bool:
        """Has processes ready that a group is to be replaced with, and returns whether it is to be replaced.

        It is not, when there is no better allocation for it, unless it is dead, or was told to end.
        Raises: ``RuntimeError`` when the processes cannot be had.
        """
        numbers = self._numbers_of({mpmd_idx})
        if kind in (DRAINED, REPLACED) and self.spares.count_ready() >= len(numbers):
            return True
        allocations = self.allocations.find(
            mpmd_idx, self.infos, seconds=PROMPT_SECONDS, check=self.check_open
        )
        elsewhere = {
            number: allocation
            for number, allocation in allocations.items()
            if kind == REPLACED or allocation != self.allocations.of(number)
        }
        if elsewhere:
            self.spares.prepare(elsewhere, self._timeout)
        return bool(elsewhere or self._told_to_end() & set(numbers))

    def release(self) -> None:
        self.stop.set()
        for actor in self.actors:
            self._session.kill(actor)
        self.spares.discard()
        self._session.remove(self.allocations.placement_groups)
