"""The processes of a mesh that recovers: replaces dead processes, and connects all processes again.

Methods block until their work is done, and raise when another process dies meanwhile, or ``stop`` was set.
``find_dead`` then tells which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

from ray.actor import ActorHandle

from cluster.driver.calls.actor_calls import ActorCalls
from cluster.driver.calls.watchdog import Limits
from cluster.driver.ray_session import RaySession
from cluster.driver.runtime import LoadRequests
from cluster.protocol.process_info import Placement, ProcessInfo
from cluster.protocol.versions import versions_here
from cluster.recovery.copies import Copies
from cluster.recovery.liveness_waiter import Calls, LivenessWaiter, Pings, SupersededError
from cluster.recovery.replacements import Replacements
from cluster.start.connect import (
    ProcessLostError,
    StartingActors,
    connect_driver,
    connect_groups,
    open_groups,
)
from cluster.tcp.connection import Connection
from cluster.transports.choice import OBJECT_STORE, choose
from mpmd.errors import MESH_CLOSED, GroupDiedError
from mpmd.ir.plan import Edge


class ProcessPool:
    """The running processes.

    Args:
      replacements: starts processes in the allocations of ``actors``.
      actors: the actor of each process.
      placement: where the processes run; kept up to date.
      transport, encryption: the arguments of ``launch``.
      gathering: the edges over which values are gathered, as loaded programs know them.
      timeout: seconds that a process may take to start, and to connect.
      limits: when another process has died, a process that is in one task for longer counts as dead as well.
      left_out: the groups that have no snapshots and keep none.

    Attributes:
      copies: the copies of the processes' values.
      stop: is set when the mesh is closed.
    """

    def __init__(
        self,
        replacements: Replacements,
        actors: Sequence[ActorHandle],
        placement: Placement,
        transport: str,
        encryption: bool | None,
        gathering: frozenset[Edge],
        timeout: float,
        limits: Limits,
        left_out: Collection[int] = (),
    ):
        self.replacements = replacements
        self.allocations = replacements.allocations
        self.actors = list(actors)
        self.processes = replacements.starter.endpoints
        self._infos = list(placement.processes)
        self._placement = placement
        self._transport = transport
        self._encryption = encryption
        self._gathering = gathering
        self.timeout = timeout
        self._limits = limits
        self._session = RaySession()
        self._resetting: Calls = {}  # of processes that are not new
        self._waiter = LivenessWaiter(self.actors, self.processes, limits)
        self.copies = Copies(self.actors, self.processes, self._infos, self._waiter, left_out)
        self.stop = self._waiter.stop

    @property
    def infos(self) -> tuple[ProcessInfo, ...]:
        """The processes, and where they run."""
        return tuple(self._infos)

    def calls(
        self, connections: Sequence[Connection], on_death: Callable[[GroupDiedError], object]
    ) -> ActorCalls:
        """Returns calls on the present processes, over the driver's ``connections``."""
        placement_groups = self.allocations.placement_groups
        return ActorCalls(
            self.actors, self.processes, placement_groups, connections, self.infos, self._limits, on_death
        )

    # Replacing, in the order of the steps.

    def check_open(self) -> None:
        """Raises ``SupersededError`` when the mesh was closed."""
        if self.stop.is_set():
            raise SupersededError(MESH_CLOSED)

    def kill(self, groups: Collection[int]) -> None:
        """Kills the processes of ``groups`` that still run, and forgets their copies."""
        gone = self._numbers_of(groups)
        for number in gone:
            self._session.kill(self.actors[number])
        self.copies.lose(gone)
        self._resetting = {call: n for call, n in self._resetting.items() if n not in gone}

    def reset(self, but: Collection[int], programs: Sequence[int]) -> None:
        """Has the processes of all groups except ``but`` end their connections. Does not wait for the end.

        They keep ``programs``, and drop programs that some processes have not loaded.
        """
        self._resetting = {}
        for number in self._numbers_of(set(range(len(self._infos))) - set(but)):
            self.actors[number].interrupt.remote()
            self._resetting[self.actors[number].reset.remote(programs)] = number

    def start(self, groups: Collection[int]) -> None:
        """Starts new processes for ``groups``, whose processes have ended. May wait for room."""
        gone = self._numbers_of(groups)
        for number, actor in self.replacements.replace(gone, self._infos, self.check_open).items():
            self.actors[number] = actor

    def open(self, groups: Collection[int], on_lost: Callable[[ProcessLostError], object]) -> None:
        """Has new processes take their devices.

        Args:
          on_lost: is called when a process that is reset has died. It starts a replacement, or sets ``stop``.
        """
        pings: Pings = {}

        def check() -> None:
            self.check_open()
            is_reset = set(self._resetting.values())
            self.allocations.check_nodes(n for n in range(len(self.actors)) if n not in is_reset)
            try:
                self._waiter.check_alive(is_reset, pings, self._limits)
            except ProcessLostError as error:
                on_lost(error)

        numbers = self._numbers_of(groups)
        opened = open_groups(self._starting(numbers, check), versions_here())
        for number, info in zip(numbers, opened, strict=True):
            self._infos[number] = self.replacements.placed(number, info)

    def await_reset(self) -> None:
        """Waits for the processes that are reset; nobody else watches the steps that they end now."""
        self._waiter.wait_for(self._resetting, limits=self._limits)
        self._resetting = {}

    def _numbers_of(self, groups: Collection[int]) -> list[int]:
        return [number for number, process in enumerate(self.processes) if process.mpmd_idx in groups]

    def _starting(self, numbers: Sequence[int], check: Callable[[], None]) -> StartingActors:
        actors, processes = [self.actors[i] for i in numbers], [self.processes[i] for i in numbers]
        return StartingActors(actors, processes, self.timeout, check)

    def _connecting_actors(self) -> StartingActors:
        """All actors, with a check that raises when a process does not answer or ``stop`` is set."""
        pings: Pings = {}

        def check() -> None:
            self.check_open()
            self._waiter.check_alive(range(len(self.actors)), pings)

        return self._starting(range(len(self.actors)), check)

    def connect(self) -> None:
        """Connects all processes with one another."""
        starting = self._connecting_actors()
        transports = choose(self._transport, self._infos)
        connect_groups(starting, self._infos, transports, self._gathering, self._encryption)
        self._placement.processes, self._placement.transports = tuple(self._infos), transports

    def load(self, groups: Collection[int], loads: Mapping[int, LoadRequests]) -> None:
        """Has the processes of ``groups`` load their programs, in ascending order of program numbers."""
        programs = [
            (i, program, requests)
            for i in self._numbers_of(groups)
            for program, requests in sorted(loads.items())
            if self.processes[i].mpmd_idx in requests.by_group
        ]
        self._waiter.wait_for(
            {self.actors[i].ship.remote(program, requests.shipment): i for i, program, requests in programs}
        )
        loading: Calls = {}
        for i, _, requests in programs:
            for request in requests.by_group[self.processes[i].mpmd_idx]:
                loading[self.actors[i].answer.remote(request)] = i
        self._waiter.wait_for(loading, limits=self._limits)

    def connect_driver(self) -> list[Connection]:
        """The driver's new connection with each process, as ``ActorCalls`` takes them."""
        if self._transport == OBJECT_STORE:
            return []
        starting = self._connecting_actors()
        with contextlib.ExitStack() as undo:
            connections = connect_driver(starting, self._infos, self._encryption, undo)
            undo.pop_all()
        return connections

    def find_dead(self) -> set[int]:
        """The groups of which a process is gone, does not answer, or is stuck."""
        return self._waiter.find_dead()

    def release(self) -> None:
        """Ends all processes, and gives their resources back."""
        self.stop.set()
        for actor in self.actors:
            self._session.kill(actor)
        self.replacements.discard()
        self._session.remove(self.allocations.placement_groups)
