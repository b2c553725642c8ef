"""The processes of a mesh that recovers: replaces dead ones, and connects all anew.

What is called here blocks until it is done, and raises when another process dies meanwhile, or ``stop`` was
set. ``find_dead`` then tells which, and the replacement starts again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ray.actor import ActorHandle

from cluster.driver.calls.actor_calls import ActorCalls
from cluster.driver.calls.watchdog import Limits
from cluster.driver.ray_session import RaySession
from cluster.driver.runtime import LoadRequests
from cluster.protocol.process_info import Placement, ProcessInfo
from cluster.protocol.versions import versions_here
from cluster.recovery.allocations import NoAllocationError, NodeGoneError
from cluster.recovery.copies import Copies, CopiesLostError
from cluster.recovery.journal import BEGINNING
from cluster.recovery.liveness_waiter import Calls, LivenessWaiter, Pings, ProcessLostError, SupersededError
from cluster.recovery.replacements import Replacements
from cluster.start.connect import StartingActors, connect_driver, connect_groups, open_groups
from cluster.tcp.connection import Connection
from cluster.transports.choice import OBJECT_STORE, choose
from mpmd.errors import MESH_CLOSED, GroupDiedError, RecoveryError
from mpmd.ir.plan import Edge
from mpmd.util.stopwatch import Stopwatch


class Replacement(NamedTuple):
    """All groups run again.

    Attributes:
      groups: those that were replaced.
      connections: the driver's with each process, as ``ActorCalls`` takes them.
      lost: why no group has a value any more; ``None`` when all have those of the snapshot.
    """

    groups: frozenset[int]
    connections: list[Connection]
    lost: str | None


class ProcessPool:
    """The running processes.

    Args:
      replacements: starts others in the allocations of ``actors``.
      actors: one for each process.
      placement: where they are; kept up to date.
      transport, encryption: as ``launch`` was asked.
      gathering: the edges over which values are gathered, as loaded programs know them.
      timeout: seconds that a process may take to start, and the connections to be made.
      limits: a process that is in one task for longer, when others have died, counts as dead as well.

    Attributes:
      copies: of the processes' values.
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
    ):
        self.replacements = replacements
        self.allocations = replacements.allocations
        self._members = replacements.starter.members
        self.actors = list(actors)
        self.processes = tuple(member.endpoint for member in self._members)
        self._infos = list(placement.processes)
        self._placement = placement
        self._transport = transport
        self._encryption = encryption
        self._gathering = gathering
        self.timeout = timeout
        self._limits = limits
        self._session = RaySession()
        self._unopened: set[int] = set()  # the groups whose new processes have not taken their devices yet,
        self._unloaded: set[int] = set()  # and those that may not have the programs
        self._waiter = LivenessWaiter(self.actors, self.processes, limits)
        self.copies = Copies(self.actors, self.processes, self._infos, self._waiter)
        self.stop = self._waiter.stop

    @property
    def infos(self) -> tuple[ProcessInfo, ...]:
        """The processes, and where they run."""
        return tuple(self._infos)

    def calls(
        self, connections: Sequence[Connection], on_death: Callable[[GroupDiedError], object]
    ) -> ActorCalls:
        """Makes calls on the processes that there are now, over the driver's connections with them."""
        placement_groups = self.allocations.placement_groups
        return ActorCalls(
            self.actors, self.processes, placement_groups, connections, self.infos, self._limits, on_death
        )

    # Replacing.

    def replace_all(
        self,
        dead: Iterable[int],
        loads: Mapping[int, LoadRequests],
        snapshot: int,
        watch: Stopwatch,
        count_failure: Callable[[Exception], None],
    ) -> Replacement:
        """Puts new processes in place of those of dead groups, and has all go back to a snapshot.

        Again and again while other groups die; processes that were started before stay.

        Args:
          dead: the groups.
          loads: the programs that they have to load, by number.
          snapshot: the number of the committed one.
          watch: is told how long each phase takes.
          count_failure: is called when a new process has died, or nothing is known to have, with the reason;
            raises ``RecoveryError`` to give up.

        Raises: ``SupersededError``, ``RecoveryError``.
        """
        lost, dying = None, set(dead)
        self._unopened.clear()
        self._unloaded.clear()
        while True:
            try:
                connections = self._replace(dying, loads, snapshot, watch, count_failure)
                return Replacement(frozenset(self._unloaded), connections, lost)
            except CopiesLostError as error:
                snapshot, lost, dying = BEGINNING, str(error), set()
            except (SupersededError, RecoveryError):
                raise
            except Exception as error:  # a death; or there is no allocation, and there will be none next time
                dying = {error.mpmd_idx} if isinstance(error, ProcessLostError) else self._waiter.find_dead()
                self._count(error, dying, count_failure)
                dying |= self._unusable(dying)

    def _unusable(self, dying: Collection[int]) -> set[int]:
        """The groups whose new processes cannot be kept when a replacement has failed."""
        if self._unopened or not dying:  # they may be why
            return set(self._unopened or self._unloaded)
        # Processes of one group may be meeting, and one of them has perhaps given up.
        return {i for i in self._unloaded if len(self._numbers_of({i})) > 1}

    def _replace(
        self,
        dead: Collection[int],
        loads: Mapping[int, LoadRequests],
        snapshot: int,
        watch: Stopwatch,
        count_failure: Callable[[Exception], None],
    ) -> list[Connection]:
        """Returns the driver's connection with each process, as ``ActorCalls`` takes them.

        Raises: ``ProcessLostError`` or anything else when another process has died meanwhile, or a new one
          cannot start; ``CopiesLostError`` when no process has the snapshot of a dead one.
        """
        self.check_open()
        with watch("started"):
            self._end(dead)
            resetting = self._reset(self._numbers_outside(self._unopened), list(loads))
            self._start(dead)  # may wait for room
            self._open_started(resetting, count_failure)
            # Nobody else watches the steps that end now.
            self._waiter.wait_for(resetting, limits=self._limits)
        self.copies.check(snapshot)
        with watch("connected"):
            self._connect()  # after which a process knows what a program's messages need
        with watch("loaded"):
            self._load(self._numbers_of(self._unloaded), loads)
        with watch("restored"):
            self.copies.restore(snapshot, self._infos)
        with watch("connected"):
            return self._connect_driver()

    def check_open(self) -> None:
        """Raises ``SupersededError`` when the mesh was closed."""
        if self.stop.is_set():
            raise SupersededError(MESH_CLOSED)

    def _count(
        self, failure: Exception, dying: Collection[int], count_failure: Callable[[Exception], None]
    ) -> None:
        """Counts a failure, unless groups have died that this recovery replaces for the first time.

        They may have died together: of a node that is gone, Ray reports one process after the other. So one
        recovery is one failure. Neither are new processes to blame when their node is gone.
        """
        if dying and not self._unloaded & set(dying):
            return
        if not isinstance(failure, NoAllocationError):
            try:
                self.allocations.check_nodes(range(len(self.actors)))
            except NodeGoneError:  # the processes that were there will get other allocations
                return
        count_failure(failure)

    def _end(self, groups: Collection[int]) -> None:
        """Ends what is left of the processes of these groups."""
        gone = self._numbers_of(groups)
        for number in gone:
            self._session.kill(self.actors[number])
        self.copies.lose(gone)
        self._unopened |= set(groups)
        self._unloaded |= set(groups)

    def _start(self, groups: Collection[int]) -> None:
        """Starts new processes in place of those of these groups, which have ended."""
        gone = self._numbers_of(groups)
        for number, actor in self.replacements.replace(gone, self._infos, self.check_open).items():
            self.actors[number] = actor

    def _numbers_of(self, groups: Collection[int]) -> list[int]:
        return [number for number, process in enumerate(self.processes) if process.mpmd_idx in groups]

    def _numbers_outside(self, groups: Collection[int]) -> list[int]:
        return [number for number, process in enumerate(self.processes) if process.mpmd_idx not in groups]

    def _open_started(self, resetting: Calls, count_failure: Callable[[Exception], None]) -> None:
        """Has new processes take their devices. They start together: also for those that die meanwhile."""
        pings: Pings = {}

        def replace_dead() -> None:
            self.check_open()
            self.allocations.check_nodes(self._numbers_of(self._unopened))
            try:
                self._waiter.check_alive(set(resetting.values()), pings, self._limits)
            except ProcessLostError as error:
                self._count(error, {error.mpmd_idx}, count_failure)
                gone = self._numbers_of({error.mpmd_idx})
                for call in [call for call, number in resetting.items() if number in gone]:
                    del resetting[call]
                self._end({error.mpmd_idx})
                self._start({error.mpmd_idx})

        while self._unopened:
            opening = set(self._unopened)
            self._open(self._numbers_of(opening), replace_dead)
            self._unopened -= opening

    def _reset(self, numbers: Iterable[int], programs: Sequence[int]) -> Calls:
        resetting: Calls = {}
        for number in numbers:
            self.actors[number].interrupt.remote()
            resetting[self.actors[number].reset.remote(programs)] = number
        return resetting

    def _open(self, numbers: Sequence[int], check: Callable[[], None]) -> None:
        starting = StartingActors(
            [self.actors[i] for i in numbers], [self.processes[i] for i in numbers], self.timeout, check
        )
        opened = open_groups(starting, [self._members[i] for i in numbers], versions_here())
        for number, info in zip(numbers, opened, strict=True):
            self._infos[number] = self.replacements.placed(number, info)

    def _load(self, numbers: Sequence[int], loads: Mapping[int, LoadRequests]) -> None:
        """All processes load at the same time, each the programs in the order of their numbers."""
        programs = sorted(loads.items())
        self._waiter.wait_for(
            {
                self.actors[i].ship.remote(program, requests.shipment): i
                for i in numbers
                for program, requests in programs
            }
        )
        loading: Calls = {}
        for i in numbers:
            for program, requests in programs:
                for executable, exported in requests.compiled.get(self.processes[i].mpmd_idx, ()):
                    loading[self.actors[i].compile.remote(program, executable, exported)] = i
                loading[self.actors[i].load.remote(program)] = i
        self._waiter.wait_for(loading, limits=self._limits)

    def _connecting_actors(self) -> StartingActors:
        """All actors; one that is stopped while the others wait for it is noticed, and so is ``stop``."""
        pings: Pings = {}

        def check() -> None:
            self.check_open()
            self._waiter.check_alive(range(len(self.actors)), pings)

        return StartingActors(self.actors, self.processes, self.timeout, check)

    def _connect(self) -> None:
        starting = self._connecting_actors()
        transports = choose(self._transport, self._infos)
        connect_groups(starting, self._infos, transports, self._gathering, self._encryption)
        self._placement.processes, self._placement.transports = tuple(self._infos), transports

    def _connect_driver(self) -> list[Connection]:
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
