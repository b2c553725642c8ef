"""The processes of a mesh that recovers: replaces dead ones, connects all anew, and copies snapshots.

What is called here blocks until it is done, and raises when another process dies meanwhile, or ``stop`` was
set. ``find_dead`` then tells which, and the replacement starts again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import ray
from ray.actor import ActorHandle

from cluster import health
from cluster.actors import Replacements
from cluster.connect import StartingActors, connect_driver, connect_groups, open_groups
from cluster.driver import LoadRequests
from cluster.endpoint import Endpoint
from cluster.places import NodeGoneError, NoPlaceError
from cluster.process_info import Placement, ProcessInfo
from cluster.ray_session import RaySession
from cluster.recovery import Copy, CopyHolders, choose_keepers
from cluster.transports.choice import OBJECT_STORE, choose
from cluster.versions import versions_here
from cluster.watchdog import NO_LIMITS, Limits
from mpmd.ir import Edge
from mpmd.runtime.journal import BEGINNING
from mpmd.stopwatch import Stopwatch

Calls = dict[ray.ObjectRef, int]
"""Calls of Ray that are under way, and the number of the process that each is made on."""

Pings = dict[int, tuple[float, ray.ObjectRef]]
"""The pings that are not answered, by the number of the process: when it was pinged, and the call."""

_POLL_SECONDS = 1.0
"""How often a wait checks that it is still wanted, and that those whom it waits for are alive."""


class SupersededError(RuntimeError):
    """What was under way is not wanted any more."""


class CopiesLostError(RuntimeError):
    """A process has died, and so has the one that kept its snapshot."""


class Fleet:
    """The running processes.

    Args:
      replacements: starts others in the places of ``actors``.
      actors: one for each process.
      processes: which process of which group each of them is.
      placement: where they are; kept up to date.
      transport: as ``launch`` was asked.
      gathering: the edges over which values are gathered, as loaded programs know them.
      timeout: seconds that a process may take to start, and the connections to be made.
      limits: a process that is in one task for longer, when others have died, counts as dead as well.
    """

    def __init__(
        self,
        replacements: Replacements,
        actors: Sequence[ActorHandle],
        processes: Sequence[Endpoint],
        placement: Placement,
        transport: str,
        gathering: frozenset[Edge],
        timeout: float,
        limits: Limits,
    ):
        self.replacements = replacements
        self.places = replacements.places
        self._members = replacements.starter.members
        self.actors = list(actors)
        self.processes = tuple(processes)
        self._infos = list(placement.processes)
        self._placement = placement
        self._transport = transport
        self._gathering = gathering
        self.timeout = timeout
        self._limits = limits
        self._session = RaySession()
        self._keepers = choose_keepers(self._infos)
        self._holders = CopyHolders(self._keepers)
        self.stop = threading.Event()

    @property
    def infos(self) -> tuple[ProcessInfo, ...]:
        """Where the processes are."""
        return tuple(self._infos)

    # Replacing.

    def replace_all(
        self,
        dead: Iterable[int],
        loads: Mapping[int, LoadRequests],
        snapshot: int,
        watch: Stopwatch,
        count_failure: Callable[[Exception], None],
    ) -> tuple[set[int], list[socket.socket]]:
        """As ``replace``, again and again while other groups die.

        Args:
          count_failure: is called when a replacement has failed, with the reason; raises to give up.

        Returns: also the groups that were replaced.
        Raises: ``CopiesLostError``, ``SupersededError``, and what ``count_failure`` raises.
        """
        replaced = set(dead)
        while True:
            try:
                return replaced, self.replace(replaced, loads, snapshot, watch)
            except (CopiesLostError, SupersededError):
                raise
            except Exception as error:  # a death; or there is no place, and there will be none next time
                if isinstance(error, NoPlaceError) or not self._has_lost_nodes():
                    count_failure(error)
                replaced |= self.find_dead()

    def _has_lost_nodes(self) -> bool:
        """Whether the place of a process has gone, so that it will be started in another one."""
        try:
            self.places.check_nodes(range(len(self.actors)))
        except NodeGoneError:
            return True
        return False

    def replace(
        self, dead: Collection[int], loads: Mapping[int, LoadRequests], snapshot: int, watch: Stopwatch
    ) -> list[socket.socket]:
        """Puts new processes in place of those of dead groups, and has all go back to a snapshot.

        Args:
          dead: the groups.
          loads: the programs that they have to load, by number.
          snapshot: the number of the committed one.
          watch: is told how long each phase takes.

        Returns: the driver's connection with each process, as ``ActorCalls`` takes them.
        Raises: ``CopiesLostError`` when no process has the snapshot of a dead one; anything else when another
          process has died meanwhile, or a new one cannot start.
        """
        self.check_open()
        gone = [number for number, process in enumerate(self.processes) if process.mpmd_idx in dead]
        self._check_copies(gone, snapshot)
        with watch("started"):
            for number in gone:
                self._session.kill(self.actors[number])
            resetting = self._reset([i for i in range(len(self.actors)) if i not in gone], list(loads))
            for number, actor in self.replacements.replace(gone, self._infos, self.check_open).items():
                self.actors[number] = actor
            self._open(gone)
            self.wait_for(resetting, limits=self._limits)  # nobody else watches the steps that end now
        with watch("connected"):
            self._connect()  # after which a process knows what a program's messages need
        with watch("loaded"):
            self._load(gone, loads)
        with watch("restored"):
            self._restore(snapshot)
        with watch("connected"):
            return self._connect_driver()

    def check_open(self) -> None:
        """Raises ``SupersededError`` when the mesh was closed."""
        if self.stop.is_set():
            raise SupersededError("the mesh was closed")

    def _check_copies(self, gone: Sequence[int], snapshot: int) -> None:
        if snapshot == BEGINNING:
            return
        self._holders.lose(gone)
        if lost := self._holders.lost:
            names = " and ".join(
                f"{self.processes[i].name} and {self.processes[self._keepers[i]].name}, which kept its values"
                for i in lost
            )
            raise CopiesLostError(f"{names}, have died together")

    def _reset(self, numbers: Iterable[int], programs: Sequence[int]) -> Calls:
        resetting: Calls = {}
        for number in numbers:
            self.actors[number].interrupt.remote()
            resetting[self.actors[number].reset.remote(programs)] = number
        return resetting

    def _open(self, numbers: Sequence[int]) -> None:
        starting = StartingActors(
            [self.actors[i] for i in numbers],
            [self.processes[i] for i in numbers],
            self.timeout,
            lambda: self.places.check_nodes(numbers),
        )
        opened = open_groups(starting, [self._members[i] for i in numbers], versions_here())
        for number, info in zip(numbers, opened, strict=True):
            self._infos[number] = self.replacements.placed(number, info)

    def _load(self, numbers: Sequence[int], loads: Mapping[int, LoadRequests]) -> None:
        """All processes load at the same time, each the programs in the order of their numbers."""
        programs = sorted(loads.items())
        self.wait_for(
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
        self.wait_for(loading)

    def _connecting_actors(self) -> StartingActors:
        """All actors; one that is stopped while the others wait for it is noticed."""
        pings: Pings = {}
        numbers = range(len(self.actors))
        return StartingActors(
            self.actors, self.processes, self.timeout, lambda: self._check_alive(numbers, pings)
        )

    def _connect(self) -> None:
        starting = self._connecting_actors()
        transports = choose(self._transport, self._infos)
        connect_groups(starting, self._infos, transports, self._gathering)
        self._placement.processes, self._placement.transports = tuple(self._infos), transports

    def _connect_driver(self) -> list[socket.socket]:
        if self._transport == OBJECT_STORE:
            return []
        starting = self._connecting_actors()
        with contextlib.ExitStack() as undo:
            connections = connect_driver(starting, self._infos, undo)
            undo.pop_all()
        return connections

    def _restore(self, snapshot: int) -> None:
        """Also makes up for the copies that dead processes have kept, so that any group may die next."""
        keepers = choose_keepers(self._infos)
        if snapshot != BEGINNING:
            self._copy(self._holders.missing(keepers), snapshot, BEGINNING)
            self._holders = CopyHolders(keepers)
        self._keepers = keepers
        kept = [[owner for owner, keeper in enumerate(keepers) if keeper == i] for i in range(len(keepers))]
        self.wait_for({actor.restore.remote(snapshot, kept[i]): i for i, actor in enumerate(self.actors)})

    # Snapshots.

    def copy_away(self, snapshot: int, base: int, is_wanted: Callable[[], bool]) -> None:
        """Copies what every process has copied for a snapshot, and not for the base, to its keeper.

        Raises: ``SupersededError`` when it is no longer wanted, and when a process dies whatever Ray raises.
        """
        copies = [Copy(owner, owner, keeper) for owner, keeper in enumerate(self._keepers)]
        self._copy(copies, snapshot, base, is_wanted)

    def mark_committed(self) -> None:
        """The last snapshot is committed: all processes and their keepers have it."""
        self._holders = CopyHolders(self._keepers)

    def _copy(
        self, copies: Sequence[Copy], snapshot: int, base: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Part by part, which Ray carries, so that neither the driver nor Ray's memory has to hold it all."""
        actors = self.actors
        counting: Calls = {
            actors[copy.src].count_chunks.remote(copy.owner, snapshot, base): copy.src for copy in copies
        }
        self.wait_for(counting, is_wanted)
        counts = dict(zip(copies, ray.get(list(counting)), strict=True))
        for index in range(max(counts.values(), default=0)):
            current = [copy for copy in copies if index < counts[copy]]
            parts: list[ray.ObjectRef] = [
                actors[c.src].hand_over.remote(c.owner, snapshot, base, index) for c in current
            ]
            # An actor's later calls wait for those whose arguments are not there yet, so they have to be.
            handing_over = {part: copy.src for part, copy in zip(parts, current, strict=True)}
            self.wait_for(handing_over, is_wanted, fetch=False)
            keeping: Calls = {
                actors[c.dst].keep.remote(c.owner, snapshot, base, index, part): c.dst
                for c, part in zip(current, parts, strict=True)
            }
            del parts, handing_over
            self.wait_for(keeping, is_wanted)

    # Waiting.

    def wait_for(
        self,
        calls: Calls,
        is_wanted: Callable[[], bool] = lambda: True,
        fetch: bool = True,
        limits: Limits = NO_LIMITS,
    ) -> None:
        """Waits for calls, as long as the processes that were called are alive, and raises their errors.

        Args:
          is_wanted: whether to go on waiting.
          fetch: not, for results that are not for the driver; their errors are raised to who gets them.
          limits: of what those who were called may be doing meanwhile.
        """
        waiting = list(calls)
        pings: Pings = {}
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=_POLL_SECONDS, fetch_local=False)
            if self.stop.is_set() or not is_wanted():
                raise SupersededError("the mesh was closed, or a group has died")
            if fetch:
                ray.get(ready)
            if not ready:
                self._check_alive({calls[call] for call in waiting}, pings, limits)

    def _check_alive(self, numbers: Iterable[int], pings: Pings, limits: Limits = NO_LIMITS) -> None:
        now = time.monotonic()
        for number in numbers:
            if number not in pings:
                pings[number] = now, self.actors[number].health.remote()
            since, ping = pings[number]
            if ray.wait([ping], timeout=0)[0]:
                del pings[number]
                if limits.exclude(doing := ray.get(ping)):
                    raise RuntimeError(f"{self.processes[number].name} is stuck: it is {doing}")
            elif now - since > health.UNRESPONSIVE_SECONDS:
                raise RuntimeError(f"{self.processes[number].name} has not answered for {now - since:.0f} s")

    def find_dead(self) -> set[int]:
        """The groups of which a process is gone, does not answer, or is stuck."""
        pings: list[ray.ObjectRef] = [actor.health.remote() for actor in self.actors]
        ray.wait(pings, num_returns=len(pings), timeout=health.PING_SECONDS)
        return {
            process.mpmd_idx
            for process, ping in zip(self.processes, pings, strict=True)
            if not self._is_well(ping)
        }

    def _is_well(self, ping: ray.ObjectRef) -> bool:
        try:
            return not self._limits.exclude(ray.get(ping, timeout=0))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return False

    def release(self) -> None:
        """Ends all processes, and gives their resources back."""
        self.stop.set()
        for actor in self.actors:
            self._session.kill(actor)
        self.replacements.discard()
        self._session.remove(self.places.placement_groups)
