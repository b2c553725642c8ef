"""Has actors that were started take their devices, and connects them with one another and the driver."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle

from cluster.protocol.endpoint import DRIVER, Endpoint
from cluster.protocol.process_info import Location, ProcessInfo, ProcessPlacement
from cluster.protocol.versions import Versions, check_versions
from cluster.ray_compat import log_directory, progress_of
from cluster.tcp import sockets
from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials, make_credentials
from cluster.tcp.listener import OUT_OF_RESOURCES
from cluster.transports.choice import OBJECT_STORE, SHARED_MEMORY, TCP, choose
from mpmd.errors import GroupDiedError
from mpmd.ir.plan import Edge
from mpmd.ir.routes import Topology

_CHECK_SECONDS = 0.25

START_SECONDS = 300.0
"""The seconds that actors may take to start, by default: to import JAX is slow on a busy machine."""

_QUIET_SECONDS = 30.0
"""The seconds of a wait for actors after which stderr reports their progress."""

_REASON_SECONDS = 1.0


class StartingActors(NamedTuple):
    """The actors that start, their processes, and the seconds that each call may take.

    ``check`` is called now and then during a wait for actors, and raises to wait no longer.
    """

    actors: Sequence[ActorHandle]
    processes: Sequence[Endpoint]
    timeout: float
    check: Callable[[], None] = lambda: None

    def call(self, method: str, arguments: Sequence[tuple]) -> list[Any]:
        calls: list[ray.ObjectRef] = [
            getattr(actor, method).remote(*each) for actor, each in zip(self.actors, arguments, strict=True)
        ]
        waiting, start, notice = calls, time.monotonic(), _QUIET_SECONDS
        while waiting:
            seconds = time.monotonic() - start
            left = max(self.timeout - seconds, 0)
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=min(left, _CHECK_SECONDS))
            if not ready:
                self.check()
            if not ready and (left < _CHECK_SECONDS or seconds >= notice):
                late = {self.processes[i].name: self.actors[i] for i in map(calls.index, waiting)}
                error = late_error(
                    f"the actors of {', '.join(late)} did not start within "
                    f"{min(seconds + _CHECK_SECONDS, self.timeout):.3g} s",
                    late,
                )
                if left < _CHECK_SECONDS:
                    raise error
                notice = self.timeout  # of which the error says as much
                print(f"cluster: waiting up to {self.timeout:g} s: {error}", file=sys.stderr, flush=True)
            for call in ready:
                if (failure := error_of(call)) is not None:
                    name = self.processes[calls.index(call)].name
                    raise self._shortage(calls) or RuntimeError(
                        f"{name} could not start: {failure}"
                    ) from failure
        return ray.get(calls)

    def _shortage(self, calls: list[ray.ObjectRef]) -> GroupDiedError | None:
        """The error of a process to which the system refuses further descriptors or memory.

        Its peers have failed to connect, perhaps before it has reported its own error.
        """
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=_REASON_SECONDS)
        for call in answered:
            cause = getattr(error_of(call), "cause", None)
            if isinstance(cause, OSError) and cause.errno in OUT_OF_RESOURCES:
                process = self.processes[calls.index(call)]
                reason = f"{process.name} cannot connect: {type(cause).__name__}: {cause}"
                return GroupDiedError(reason, process.mpmd_idx)
        return None


def error_of(call: ray.ObjectRef) -> ray.exceptions.RayError | None:
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        return error
    return None


def late_error(title: str, late: Mapping[str, ActorHandle]) -> RuntimeError:
    lines = (f"  {name}: {progress_of(actor)}" for name, actor in late.items())
    where = (
        f"Ray's logs are in {log_directory()} on the node of each: worker-*-PID.err, and raylet.out for what "
        "is queued. If the machine is busy, give it more time: launch(timeout=...), in seconds"
    )
    return RuntimeError("\n".join([f"{title}:", *lines, where]))


def open_groups(actors: StartingActors, versions: Versions) -> list[ProcessInfo]:
    """Has the processes of each group meet, and take their devices.

    Raises: ``RuntimeError`` when one cannot, or has other ``versions`` than the driver.
    """
    locations: list[Location] = actors.call("locate", [()] * len(actors.processes))
    names = [process.name for process in actors.processes]
    check_versions(versions, dict(zip(names, (location.versions for location in locations), strict=True)))
    groups: dict[int, list[Location]] = {}
    for process, location in zip(actors.processes, locations, strict=True):
        groups.setdefault(process.mpmd_idx, []).append(location)
    opening = []
    for of_group in groups.values():
        hosts, port = _hosts(of_group), of_group[0].port
        coordinator = None if port is None else (hosts[0], port)
        opening += [(coordinator, host, actors.timeout) for host in hosts]
    return actors.call("open", opening)


def _hosts(locations: Sequence[Location] | Sequence[ProcessInfo]) -> list[str]:
    """The address of each process, at which the other processes of ``locations`` reach it."""
    one_host = len({location.node for location in locations}) == 1
    return ["127.0.0.1" if one_host else location.node for location in locations]


class Connected(NamedTuple):
    """``connections`` are the driver's with each process; empty where it calls processes by Ray."""

    topology: Topology
    placement: ProcessPlacement
    connections: list[Connection]


def connect(
    actors: StartingActors,
    infos: Sequence[ProcessInfo],
    transport: str,
    encryption: bool | None,
    topology: Topology | None = None,
) -> Connected:
    """Connects processes with one another, and with the driver unless all is left to Ray.

    Args:
      topology: as loaded programs know it, if there are any.

    Raises: ``ValueError`` when the transport cannot connect them, ``RuntimeError`` when a process
      cannot be reached.
    """
    transports = choose(transport, infos)
    topology = topology or Topology(actors.processes[0].groups, gathering_edges(infos, transports))
    routes: list[dict[int, str]] = [{} for _ in infos]
    for (a, b), name in transports.items():
        routes[a][b] = routes[b][a] = name
    credentials, by_tcp = make_credentials(encryption), transport != OBJECT_STORE
    listening = []
    for process, route, host in zip(actors.processes, routes, _listening_hosts(infos), strict=True):
        # What is left to Ray needs no port, except that the processes of a group agree with one another.
        tcp = {TCP} if by_tcp or process.partners else set()
        listening.append((sorted({*route.values()} | tcp), host, credentials))
    addresses = actors.call("listen", listening)
    connections: list[Connection] = []
    with contextlib.ExitStack() as undo:
        if by_tcp:
            for process, address in zip(actors.processes, addresses, strict=True):
                connection = _connect_driver(process, address[TCP], credentials, actors)
                connections.append(undo.enter_context(connection))
        actors.call("connect", [(route, topology.gathering, addresses, by_tcp) for route in routes])
        undo.pop_all()
    return Connected(topology, ProcessPlacement(tuple(infos), transports), connections)


def _listening_hosts(infos: Sequence[ProcessInfo]) -> list[str]:
    """The address of each process, at which the other processes and the driver reach it."""
    here = ray.get_runtime_context().get_node_id()
    return _hosts(infos) if any(info.node_id == here for info in infos) else [info.node for info in infos]


def gathering_edges(
    infos: Sequence[ProcessInfo], transports: Mapping[tuple[int, int], str]
) -> frozenset[Edge]:
    """The edges over which a part for several processes travels once: all except in shared memory.

    In shared memory, each process reads the parts that it needs, which is as fast as to gather them, and
    simpler.
    """
    gathering: set[Edge] = set()
    for (a, b), name in transports.items():
        if name != SHARED_MEMORY:
            groups = infos[a].mpmd_idx, infos[b].mpmd_idx
            gathering |= {groups, groups[::-1]}
    return frozenset(gathering)


def _connect_driver(
    process: Endpoint, address: sockets.Address, credentials: Credentials, actors: StartingActors
) -> Connection:
    try:
        return sockets.connect(address, credentials, actors.timeout, DRIVER, actors.check)
    except ConnectionError as error:
        hint = f"If the network closes its ports, use transport={OBJECT_STORE!r}, which leaves all to Ray"
        message = f"the driver cannot reach {process.name}: {error}. {hint}"
        raise GroupDiedError(message, process.mpmd_idx) from error
