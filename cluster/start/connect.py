"""Has actors that were started take their devices, and connects them with one another and the driver."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle

from cluster.protocol.endpoint import Endpoint, Member
from cluster.protocol.process_info import Location, Placement, ProcessInfo
from cluster.protocol.versions import Versions, check_versions
from cluster.tcp import sockets
from cluster.tcp.connection import Connection
from cluster.tcp.credentials import make_credentials
from cluster.transports.choice import OBJECT_STORE, SHARED_MEMORY, choose
from mpmd.ir.plan import Edge
from mpmd.ir.reshard import GroupShape
from mpmd.ir.routes import Topology

_CHECK_SECONDS = 0.25
"""The seconds between two checks of a wait for actors."""


class StartingActors(NamedTuple):
    """The actors that start, the processes they are, and the seconds that each call may take.

    ``check`` is called now and then while others are waited for, and raises to wait no longer.
    """

    actors: Sequence[ActorHandle]
    processes: Sequence[Endpoint]
    timeout: float
    check: Callable[[], None] = lambda: None

    def call(self, method: str, arguments: Sequence[tuple]) -> list[Any]:
        """Calls all actors at the same time and returns their replies."""
        calls: list[ray.ObjectRef] = [
            getattr(actor, method).remote(*each) for actor, each in zip(self.actors, arguments, strict=True)
        ]
        process_of = dict(zip(calls, self.processes, strict=True))
        waiting, deadline = calls, time.monotonic() + self.timeout
        while waiting:
            left = max(deadline - time.monotonic(), 0)
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=min(left, _CHECK_SECONDS))
            if not ready:
                self.check()
            if not ready and left < _CHECK_SECONDS:
                late = ", ".join(process_of[call].name for call in waiting)
                raise RuntimeError(f"the actors of {late} did not start within {self.timeout:g} s")
            for call in ready:  # the first error is the reason: others may wait for that process in vain
                try:
                    ray.get(call)
                except ray.exceptions.RayError as error:
                    raise RuntimeError(f"{process_of[call].name} could not start: {error}") from error
        return ray.get(calls)


def open_groups(actors: StartingActors, members: Sequence[Member], versions: Versions) -> list[ProcessInfo]:
    """Has the processes of each group meet, and take their devices.

    Raises: ``RuntimeError`` when one cannot, or has other ``versions`` than the driver.
    """
    locations: list[Location] = actors.call("locate", [()] * len(members))
    names = [process.name for process in actors.processes]
    check_versions(versions, dict(zip(names, (location.versions for location in locations), strict=True)))
    groups: dict[int, list[Location]] = {}
    for member, location in zip(members, locations, strict=True):
        groups.setdefault(member.mpmd_idx, []).append(location)
    opening = []
    for of_group in groups.values():
        hosts, port = _hosts(of_group), of_group[0].port
        coordinator = None if port is None else (hosts[0], port)
        opening += [(coordinator, host, actors.timeout) for host in hosts]
    return actors.call("open", opening)


def _hosts(locations: Sequence[Location] | Sequence[ProcessInfo]) -> list[str]:
    """The address of each process, at which the others of these reach it."""
    one_host = len({location.node for location in locations}) == 1
    return ["127.0.0.1" if one_host else location.node for location in locations]


class Connected(NamedTuple):
    """Processes that are connected with one another and the driver.

    Attributes:
      topology: the processes of the groups, and the edges over which values are gathered.
      placement: where the processes run, and the transports between them.
      connections: the driver's with each process; none where it calls them by Ray.
    """

    topology: Topology
    placement: Placement
    connections: list[Connection]


def connect(
    actors: StartingActors,
    infos: Sequence[ProcessInfo],
    shapes: tuple[GroupShape, ...],
    transport: str,
    encryption: bool | None,
    undo: contextlib.ExitStack,
) -> Connected:
    """Connects processes with one another and with the driver.

    Args:
      infos: where the processes run.
      shapes: of the groups.
      transport, encryption: as ``launch`` was asked.
      undo: closes the connections.

    Raises: ``ValueError`` when the transport cannot connect them, ``RuntimeError`` when one is not reached.
    """
    transports = choose(transport, infos)
    topology = Topology(shapes, gathering_edges(infos, transports))
    connect_groups(actors, infos, transports, topology.gathering, encryption)
    connections: list[Connection] = []
    if transport != OBJECT_STORE:
        connections = connect_driver(actors, infos, encryption, undo)
    return Connected(topology, Placement(tuple(infos), transports), connections)


def gathering_edges(
    infos: Sequence[ProcessInfo], transports: Mapping[tuple[int, int], str]
) -> frozenset[Edge]:
    """The edges over which a part that several processes read travels once: all but those in shared memory.

    There, each process reads what it needs from memory, which is as fast as to gather it, and simpler.
    """
    gathering: set[Edge] = set()
    for (a, b), name in transports.items():
        if name != SHARED_MEMORY:
            groups = infos[a].mpmd_idx, infos[b].mpmd_idx
            gathering |= {groups, groups[::-1]}
    return frozenset(gathering)


def connect_groups(
    actors: StartingActors,
    infos: Sequence[ProcessInfo],
    transports: Mapping[tuple[int, int], str],
    gathering: frozenset[Edge],
    encryption: bool | None,
) -> None:
    """Connects the processes with one another."""
    credentials = make_credentials(encryption)
    routes: list[dict[int, str]] = [{} for _ in infos]
    for (a, b), name in transports.items():
        routes[a][b] = routes[b][a] = name
    listening = [
        (sorted(set(route.values())), host, credentials)
        for route, host in zip(routes, _hosts(infos), strict=True)
    ]
    addresses = actors.call("listen", listening)
    actors.call("connect", [(route, gathering, addresses, credentials, actors.timeout) for route in routes])


def connect_driver(
    actors: StartingActors,
    infos: Sequence[ProcessInfo],
    encryption: bool | None,
    undo: contextlib.ExitStack,
) -> list[Connection]:
    """Connects the driver with every process."""
    credentials = make_credentials(encryption)
    here = ray.get_runtime_context().get_node_id()
    hosts = ["127.0.0.1" if info.node_id == here else info.node for info in infos]
    addresses = actors.call("await_driver", [(host, credentials) for host in hosts])
    connections = []
    for process, address in zip(actors.processes, addresses, strict=True):
        try:
            connection = sockets.connect(address, credentials, actors.timeout, check=actors.check)
            connections.append(undo.enter_context(connection))
        except ConnectionError as error:
            hint = f"If the network closes its ports, use transport={OBJECT_STORE!r}, which leaves all to Ray"
            raise RuntimeError(f"the driver cannot reach {process.name}: {error}. {hint}") from error
    return connections
