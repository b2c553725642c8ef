"""Starts the groups: reserves resources, starts an actor for each process, and connects the actors."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster import sockets
from cluster.actor import CONCURRENCY_GROUPS, GroupActor, Member, Place
from cluster.actor_calls import ActorCalls
from cluster.driver import RayRuntime
from cluster.endpoint import Endpoint, endpoints
from cluster.environment import actor_environment
from cluster.mesh import ClusterMesh, abstract_submesh
from cluster.process_info import ProcessInfo
from cluster.resources import (
    assign_bundles,
    fitting_cpus,
    live_nodes,
    nodes_of_bundles,
    reserve,
    threads_per_process,
)
from cluster.transports.choice import AUTO, OBJECT_STORE, check_name, choose
from mpmd.reshard import GroupShape
from mpmd.stopwatch import Stopwatch

COMPILATION_CACHE = "~/.cache/mpmd"
_GPU_PLATFORMS = ("cuda", "rocm")


def launch(
    mesh_shape: Mapping[str, int],
    mpmd_axis: str,
    *,
    processes_per_group: int | None = None,
    platform: str | None = None,
    cpus_per_group: float | None = None,
    gpus_per_group: float | None = None,
    address: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    transport: str = AUTO,
    compilation_cache: str | os.PathLike[str] | None = COMPILATION_CACHE,
    timeout: float = 60.0,
) -> ClusterMesh:
    """Starts the actors of MPMD groups on a Ray cluster and returns the mesh of the groups.

    ``launch({"stage": 4, "fsdp": 2}, mpmd_axis="stage")`` makes four groups, each with a submesh of shape
    ``{"stage": 1, "fsdp": 2}``. Uses the Ray that ``ray.init`` has connected to; without one, joins the
    cluster at ``address``, or at the environment's ``RAY_ADDRESS``, which is set in Ray jobs, or else starts
    Ray on this machine and says so. Closing the mesh disconnects from, or stops, such a Ray.

    Args:
      mesh_shape: axis names and sizes of the whole mesh.
      mpmd_axis: the axis along which the groups are.
      processes_per_group: how many processes share the devices of a group, each on one node; by default one,
        or as few as the GPUs of the nodes allow. They are a ``jax.distributed`` world of their own.
      platform: ``cpu``, ``cuda``, ``rocm`` or another platform of JAX; by default ``cuda`` where the
        cluster has GPUs. On ``cpu`` a group's devices are slices of its host.
      cpus_per_group: CPUs to reserve for each group, fractions allowed; by default one, or less where the
        cluster has fewer CPUs than groups. XLA's CPU thread pool gets this size, or by default that of
        the group's share of its node.
      gpus_per_group: GPUs to reserve for each group; by default one per device on ``cuda`` and ``rocm``.
      address: of the cluster to join, ``host:port`` or ``auto``, when Ray is not connected yet.
      runtime_env: Ray's runtime environment of the actors, such as ``{"env_vars": {...}}``.
      transport: how groups exchange messages: ``shared_memory``, within a node; ``device``, JAX's transfers
        between devices, over TCP; ``object_store``, Ray's; or ``auto``, the best for each pair of groups.
        With ``object_store`` the driver's requests are made by Ray, too, with Ray's encryption if that is on;
        else the driver connects with all groups by TCP. Neither TCP nor ``device`` is encrypted.
      compilation_cache: a directory for JAX's persistent compilation cache, on each node or shared by them;
        what one run has compiled, no later run compiles. ``None`` keeps nothing. In ``runtime_env``, a
        ``JAX_COMPILATION_CACHE_DIR`` takes precedence.
      timeout: seconds to wait for the resources, and again for the actors to start.

    Raises:
      ValueError: ``mesh_shape`` or ``mpmd_axis`` is not valid, or ``transport`` cannot connect the groups.
      RuntimeError: the resources are not free within ``timeout``, or an actor cannot start or be reached.
      ConnectionError: there is no cluster at ``address``.
    """
    _check_arguments(mesh_shape, mpmd_axis, processes_per_group, cpus_per_group, gpus_per_group)
    check_name(transport)
    num_groups = mesh_shape[mpmd_axis]
    num_devices = math.prod(mesh_shape.values()) // num_groups
    submesh = abstract_submesh(mesh_shape, mpmd_axis)
    watch = Stopwatch()
    with contextlib.ExitStack() as undo:
        with watch("ray"):
            on_close = _connect_to_ray(address)
        undo.callback(on_close)
        platform = platform or _default_platform()
        if gpus_per_group is None and platform in _GPU_PLATFORMS:
            gpus_per_group = num_devices
        per_group = processes_per_group or _fewest_processes(num_devices, platform)
        shape = GroupShape(dict(submesh.shape), per_group)
        processes = endpoints([per_group] * num_groups)
        bundle = _bundle(cpus_per_group, gpus_per_group, num_groups, per_group)
        with watch("resources"):
            placement_group = reserve(bundle, len(processes), timeout)
        undo.callback(remove_placement_group, placement_group)  # which ends the actors in it
        nodes = nodes_of_bundles(placement_group)
        bundles = assign_bundles(nodes, per_group)
        if cpus_per_group:
            num_threads = [int(max(cpus_per_group / per_group, 1))] * len(processes)
        else:
            num_threads = threads_per_process([nodes[i] for i in bundles])
        environments = [_runtime_env(runtime_env or {}, platform, shape, n) for n in num_threads]
        cache = None if compilation_cache is None else os.fspath(compilation_cache)
        members = [Member(process.mpmd_idx, process.rank, (shape,) * num_groups) for process in processes]
        with watch("actors"):
            actors = _start(placement_group, bundle, bundles, environments, [(m, cache) for m in members])
            starting = _Actors(actors, processes, timeout)
            infos = _open(starting, members)
        with watch("transports"):
            transports = choose(transport, infos)
            _connect_groups(starting, infos, transports)
            connections = [] if transport == OBJECT_STORE else _connect_driver(starting, infos, undo)
        calls = ActorCalls(actors, processes, placement_group, connections)
        runtime = RayRuntime(calls, [submesh] * num_groups, platform)
        undo.pop_all()
    return ClusterMesh(
        mesh_shape=mesh_shape,
        mpmd_axis_name=mpmd_axis,
        platform=platform,
        runtime=runtime,
        processes=infos,
        transports=transports,
        seconds=watch.seconds,
        on_close=on_close,
    )


def _check_arguments(
    mesh_shape: Mapping[str, int],
    mpmd_axis: str,
    processes: int | None,
    cpus: float | None,
    gpus: float | None,
) -> None:
    if mpmd_axis not in mesh_shape:
        raise ValueError(f"mesh_shape has no axis {mpmd_axis!r}; its axes are {', '.join(mesh_shape)}")
    for axis, size in mesh_shape.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"the size of axis {axis!r} must be a positive int, not {size!r}")
    num_devices = math.prod(mesh_shape.values()) // mesh_shape[mpmd_axis]
    if processes is not None and (processes < 1 or num_devices % processes):
        raise ValueError(
            f"the {num_devices} devices of a group do not divide over processes_per_group={processes}; "
            f"possible are {', '.join(str(n) for n in range(1, num_devices + 1) if not num_devices % n)}"
        )
    if gpus and processes and gpus >= 1 and gpus % processes:
        raise ValueError(f"gpus_per_group={gpus:g} does not divide over processes_per_group={processes}")
    if cpus is not None and cpus <= 0:
        raise ValueError(f"cpus_per_group must be positive, not {cpus}")
    if gpus is not None and gpus < 0:
        raise ValueError(f"gpus_per_group must not be negative, not {gpus}")


def _connect_to_ray(address: str | None) -> Callable[[], None]:
    """Connects with Ray unless this process is connected. Returns the function that undoes it."""
    if ray.is_initialized():
        return lambda: None
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        _join_cluster(address)
    else:
        with warnings.catch_warnings():
            # JAX warns of forks; Ray's forks are harmless, because another program is started in them.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(address="local", include_dashboard=False)
        cpus = ray.cluster_resources().get("CPU", 0)
        print(
            f"cluster.launch: not connected to a Ray cluster; started Ray on this machine, {cpus:g} CPUs",
            file=sys.stderr,
        )
    return ray.shutdown


def _join_cluster(address: str) -> None:
    try:
        ray.init(address=address)
    except ConnectionError as error:
        hint = ""
        if "RAY_AUTH_MODE" not in os.environ:
            hint = (
                ". If the cluster uses token authentication, as it does by default, set RAY_AUTH_MODE=token "
                "and have its token in ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            )
        raise ConnectionError(f"no connection to the Ray cluster at {address}: {error}{hint}") from error


def _default_platform() -> str:
    return "cuda" if any(node["Resources"].get("GPU") for node in live_nodes()) else "cpu"


def _fewest_processes(num_devices: int, platform: str) -> int:
    """How many processes a group needs so that each finds its devices on one node."""
    gpus = max((int(node["Resources"].get("GPU", 0)) for node in live_nodes()), default=0)
    if platform not in _GPU_PLATFORMS or not gpus:
        return 1
    return next(n for n in range(1, num_devices + 1) if num_devices % n == 0 and num_devices // n <= gpus)


def _bundle(
    cpus_per_group: float | None, gpus_per_group: float | None, num_groups: int, per_group: int
) -> dict[str, float]:
    """The resources to reserve for each of the ``per_group`` processes of a group, by Ray's names."""
    cpus_of_nodes = [node["Resources"].get("CPU", 0) for node in live_nodes()]
    cpus = (
        cpus_per_group / per_group if cpus_per_group else fitting_cpus(cpus_of_nodes, num_groups * per_group)
    )
    return {"CPU": cpus, "GPU": gpus_per_group / per_group} if gpus_per_group else {"CPU": cpus}


def _runtime_env(
    given: Mapping[str, Any], platform: str, shape: GroupShape, num_threads: int
) -> dict[str, Any]:
    variables = given.get("env_vars") or {}
    xla_flags = os.environ.get("XLA_FLAGS", "")
    return {
        **given,
        "env_vars": actor_environment(
            given=variables,
            xla_flags=xla_flags,
            platform=platform,
            num_devices=shape.devices_per_process,
            num_threads=num_threads,
            num_processes=shape.num_processes,
        ),
    }


def _start(
    placement_group: PlacementGroup,
    bundle: Mapping[str, float],
    bundles: Sequence[int],
    environments: Sequence[dict[str, Any]],
    arguments: Sequence[tuple],
) -> list[ActorHandle]:
    """Starts an actor in each of the bundles."""
    actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(GroupActor)  # type: ignore[call-overload]
    return [
        actor_class.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,  # a restarted process would not have the group's values
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group, index),
            runtime_env=environment,
        ).remote(*given)
        for index, environment, given in zip(bundles, environments, arguments, strict=True)
    ]


class _Actors(NamedTuple):
    """The actors that start, the processes they are, and the seconds that each call may take."""

    actors: Sequence[ActorHandle]
    processes: Sequence[Endpoint]
    timeout: float

    def call(self, method: str, arguments: Sequence[tuple]) -> list[Any]:
        """Calls all actors at the same time and returns their replies."""
        calls: list[ray.ObjectRef] = [
            getattr(actor, method).remote(*given) for actor, given in zip(self.actors, arguments, strict=True)
        ]
        ready, waiting = ray.wait(calls, num_returns=len(calls), timeout=self.timeout)
        for process, call in zip(self.processes, calls, strict=True):
            if call in ready:
                try:
                    ray.get(call)
                except ray.exceptions.RayError as error:
                    raise RuntimeError(f"{process.name} could not start: {error}") from error
        if waiting:
            late = ", ".join(p.name for p, call in zip(self.processes, calls, strict=True) if call in waiting)
            raise RuntimeError(f"the actors of {late} did not start within {self.timeout:g} s")
        return ray.get(calls)


def _open(actors: _Actors, members: Sequence[Member]) -> list[ProcessInfo]:
    """Has the processes of each group meet, and take their devices."""
    places: list[Place] = actors.call("place", [()] * len(members))
    hosts = _hosts(places)
    leaders = {member.mpmd_idx: i for i, member in enumerate(members) if member.rank == 0}
    opening = []
    for member, host in zip(members, hosts, strict=True):
        leader = leaders[member.mpmd_idx]
        port = places[leader].port
        coordinator = None if port is None else (hosts[leader], port)
        opening.append((coordinator, host, actors.timeout))
    return actors.call("open", opening)


def _hosts(places: Sequence[Place] | Sequence[ProcessInfo]) -> list[str]:
    """The address of each process, at which others reach it."""
    one_host = len({place.node for place in places}) == 1
    return ["127.0.0.1" if one_host else place.node for place in places]


def _connect_groups(
    actors: _Actors, infos: Sequence[ProcessInfo], transports: Mapping[tuple[int, int], str]
) -> None:
    """Connects the processes with one another."""
    secret = secrets.token_bytes(32)
    routes: list[dict[int, str]] = [{} for _ in infos]
    for (a, b), name in transports.items():
        routes[a][b] = routes[b][a] = name
    listening = [
        (sorted(set(route.values())), host, secret) for route, host in zip(routes, _hosts(infos), strict=True)
    ]
    addresses = actors.call("listen", listening)
    actors.call("connect", [(route, addresses, secret, actors.timeout) for route in routes])


def _connect_driver(
    actors: _Actors, infos: Sequence[ProcessInfo], undo: contextlib.ExitStack
) -> list[socket.socket]:
    """Connects the driver with every process."""
    secret = secrets.token_bytes(32)
    here = ray.get_runtime_context().get_node_id()
    hosts = ["127.0.0.1" if info.node_id == here else info.node for info in infos]
    addresses = actors.call("await_driver", [(host, secret) for host in hosts])
    connections = []
    for process, address in zip(actors.processes, addresses, strict=True):
        try:
            connections.append(undo.enter_context(sockets.connect(address, secret, actors.timeout)))
        except ConnectionError as error:
            hint = f"If the network closes its ports, use transport={OBJECT_STORE!r}, which leaves all to Ray"
            raise RuntimeError(f"the driver cannot reach {process.name}: {error}. {hint}") from error
    return connections
