"""Starts the groups: reserves resources, starts an actor for each process, and connects the actors."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from cluster.actor import GroupActor
from cluster.actors import ActorStarter
from cluster.calls.actor_calls import ActorCalls
from cluster.calls.watchdog import Limits, limits_faults
from cluster.connect import StartingActors, connect_driver, connect_groups, gathering_edges, open_groups
from cluster.driver import RayRuntime
from cluster.endpoint import Endpoint, Member, endpoints
from cluster.environment import SHAREABLE_PLATFORMS, check_cache, without_effect
from cluster.mesh import ClusterMesh, abstract_submesh
from cluster.needs import bundles_of, needs_of
from cluster.process_info import Placement
from cluster.ray_connection import connect_to_ray, default_platform
from cluster.recovery.actor import RecoverableActor
from cluster.recovery.fleet import Fleet
from cluster.recovery.metrics import RecoveryMetrics
from cluster.recovery.places import Places
from cluster.recovery.policy import Recovery, check_recovery
from cluster.recovery.replacements import Replacements
from cluster.recovery.report import RecoveryReport
from cluster.recovery.runtime import RecoveringRuntime
from cluster.resources import (
    live_nodes,
    remove_all,
    reserve_places,
    reserve_separately,
)
from cluster.shapes import Request, axis_types_of, check, shapes_of, submeshes_of
from cluster.tcp.connection import Connection
from cluster.transports.choice import AUTO, OBJECT_STORE, check_encryption, check_name, choose, holdings
from cluster.versions import versions_here
from mpmd.ir.routes import Topology
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.util.stopwatch import Stopwatch
from mpmd.validation import (
    Fault,
    int_fault,
    number_fault,
    path_fault,
    raise_faults,
    str_fault,
    type_fault,
)

COMPILATION_CACHE = "~/.cache/mpmd"


def launch(
    mesh_shape: Mapping[str, int] | None = None,
    mpmd_axis: str | None = None,
    *,
    groups: Sequence[Mapping[str, int]] | None = None,
    axis_types: Mapping[str, AxisType] | AxisType | None = None,
    processes_per_group: int | Sequence[int] | None = None,
    platform: str | None = None,
    cpus_per_group: float | None = None,
    gpus_per_group: float | None = None,
    address: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    transport: str = AUTO,
    encryption: bool | None = None,
    compilation_cache: str | os.PathLike[str] | None = COMPILATION_CACHE,
    recovery: Recovery | None = None,
    timeout: float = 60.0,
    max_in_flight: int = MAX_IN_FLIGHT,
    step_timeout: float | None = None,
    stuck_after: float | None = None,
    load_timeout: float | None = None,
) -> ClusterMesh:
    """Starts the actors of MPMD groups on a Ray cluster and returns the mesh of the groups.

    ``launch({"stage": 4, "fsdp": 2}, mpmd_axis="stage")`` makes four groups, each with a submesh of shape
    ``{"stage": 1, "fsdp": 2}``, and ``launch(groups=[{"data": 4}, {"data": 2, "model": 2}])`` two groups of
    different shapes. Uses the Ray that ``ray.init`` has connected to; without one, joins the
    cluster at ``address``, or at the environment's ``RAY_ADDRESS``, which is set in Ray jobs, or else starts
    Ray on this machine and says so. Closing the mesh disconnects from, or stops, such a Ray.

    Args:
      mesh_shape: axis names and sizes of the whole mesh.
      mpmd_axis: the axis along which the groups are.
      groups: in place of both, for each group the axis names and sizes of its submesh. All submeshes have all
        of the axes; one that a group does not name has size 1.
      axis_types: ``jax.sharding.AxisType.Explicit`` for axes along which the types of values say within a
        step how they are sharded, as over a mesh of ``jax.make_mesh``: by name, or one for all axes. By
        default, and for axes that are not named, ``Auto``.
      processes_per_group: how many processes share the devices of a group, each on one node, or of each of
        the groups; by default one, or as few as the GPUs of each node allow.
      platform: ``cpu``, ``cuda``, ``rocm`` or another platform of JAX; by default ``cuda`` where the
        cluster has GPUs. On ``cpu`` a group's devices are slices of its host.
      cpus_per_group: CPUs to reserve for each group, fractions allowed, which its processes share evenly; by
        default one per process, or less where the cluster has fewer CPUs than processes. XLA's thread pool
        gets this size, or by default that of the process's share of its node.
      gpus_per_group: GPUs to reserve for each group; by default one per device on ``cuda`` and ``rocm``. With
        a part of one, such as 0.25, groups of one device share a GPU, and each takes this part of the memory
        that JAX takes of a GPU: three quarters. ``XLA_PYTHON_CLIENT_MEM_FRACTION`` in ``runtime_env`` takes
        precedence.
      address: of the cluster to join, ``host:port`` or ``auto``, when Ray is not connected yet.
      runtime_env: Ray's runtime environment of the actors, such as ``{"env_vars": {...}}``. Variables of
        JAX's settings that steps have from the driver, such as ``JAX_DEBUG_NANS``, have no effect, and warn.
      transport: how groups exchange messages: ``shared_memory``, within a node; ``network``, by TCP between
        the memory of hosts; ``device``, JAX's transfers between devices, over a port at which whoever reaches
        it can end the process; ``object_store``, Ray's; or ``auto``, which is ``shared_memory`` within a node
        and ``network`` across nodes, where the system has them.
        With ``object_store`` the driver's requests are made by Ray, too, with Ray's encryption if that is on;
        else the driver connects with all processes by TCP.
      encryption: whether the TCP connections of groups with one another and with the driver are encrypted;
        by default those between machines. To encrypt takes processor time, and may be slower than the
        network: ``False`` is for networks that nobody else has access to. What ``device`` transfers is never
        encrypted, nor are the collectives within a group of several processes.
      compilation_cache: a directory for JAX's persistent compilation cache, on each node or shared by them;
        what one run has compiled, no later run compiles. Others may not write to it, because what is in it is
        executed; it is made so if it does not exist. ``None`` keeps nothing. In ``runtime_env``, a
        ``JAX_COMPILATION_CACHE_DIR`` takes precedence.
      recovery: has the run go on when a group dies: ``cluster.Recovery(every=10)``. By default that ends it.
      timeout: seconds to wait for the resources, and again for the actors to start.
      max_in_flight: how many steps may be under way; the call of a further one waits until one is answered by
        all groups. Each holds its arguments, here and on the groups.
      step_timeout: seconds that a step may take, from the end of the one before. Then it is ended, and raises
        ``mpmd.errors.StepTimeoutError``; a group that does not leave it is killed. ``None`` is no limit.
      stuck_after: seconds that a process may be in one task of a step. Then its group is killed, and the step
        raises ``mpmd.errors.GroupStuckError``.
      load_timeout: seconds that a process may compile one executable, or do another part of loading a
        program, such as placing its constants. Then its group is killed, and loading raises that error.

    Raises:
      ValueError: shapes, processes or resources are not valid, ``transport`` cannot connect the groups, or
        others may write to the compilation cache.
      TypeError: an argument is of a wrong type.
      RuntimeError: the resources are not free within ``timeout``, an actor cannot start or be reached, or
        the processes and the driver do not have the same versions of JAX and Python.
      ConnectionError: there is no cluster at ``address``.
    """
    request = Request(
        mesh_shape,
        mpmd_axis,
        groups,
        processes_per_group,
        platform,
        cpus_per_group,
        gpus_per_group,
        axis_types,
    )
    check(request)
    check_name(transport)
    check_encryption(encryption, transport)
    limits = Limits(step_timeout, stuck_after, load_timeout)
    raise_faults(
        str_fault("address", address, optional=True),
        *_environment_faults(runtime_env),
        path_fault("compilation_cache", compilation_cache, optional=True),
        type_fault("recovery", recovery, Recovery, "cluster.Recovery(...)", optional=True),
        number_fault("timeout", timeout, "a number of seconds", above=0, finite=True),
        int_fault("max_in_flight", max_in_flight),
        *limits_faults(limits),
        title="cluster.launch: ",
    )
    submeshes = submeshes_of(request)
    check_recovery(recovery, submeshes)
    variables = (runtime_env or {}).get("env_vars") or {}
    check_cache(compilation_cache, variables)
    for text in without_effect(variables, jax.config):
        warnings.warn(text, stacklevel=2)
    watch = Stopwatch()
    with contextlib.ExitStack() as undo:
        with watch("ray"):
            on_close = connect_to_ray(address)
        undo.callback(on_close)
        platform = platform or default_platform()
        shapes = shapes_of(request, platform, [node["Resources"].get("GPU", 0) for node in live_nodes()])
        processes = endpoints([shape.num_processes for shape in shapes])
        members = [Member(process.mpmd_idx, process.rank, shapes) for process in processes]
        num_spares = recovery.spares if recovery else 0
        bundles = bundles_of(request, platform, shapes, num_spares)
        with watch("resources"):
            reserve = reserve_separately if recovery else reserve_places
            own, nodes = reserve(bundles, _teams(processes, num_spares), timeout)
        placement_groups = {place.placement_group for place in own}
        undo.callback(remove_all, placement_groups)
        share_after = recovery.share_after if recovery and platform in SHAREABLE_PLATFORMS else None
        shares = share_after is not None
        needs = needs_of(members, bundles, nodes, request, platform, runtime_env or {}, shares)
        cache = None if compilation_cache is None else os.fspath(compilation_cache)
        starter = ActorStarter(members, needs, cache, RecoverableActor if recovery else GroupActor)
        with watch("actors"):
            actors = [starter.start(number, own[number]) for number in range(len(members))]
            replacements = None
            if recovery is not None:
                mpmd_idxs = [process.mpmd_idx for process in processes]
                places = Places(own[: len(members)], bundles, mpmd_idxs, share_after, timeout)
                replacements = Replacements(starter, places, own[len(members) :])
                replacements.start_spares()
            starting = StartingActors(actors, processes, timeout)
            infos = open_groups(starting, members, versions_here())
            if replacements is not None:
                replacements.await_spares(timeout)
        with watch("transports"):
            transports = choose(transport, infos)
            topology = Topology(shapes, gathering_edges(infos, transports))
            connect_groups(starting, infos, transports, topology.gathering, encryption)
            connections: list[Connection] = []
            if transport != OBJECT_STORE:
                connections = connect_driver(starting, infos, encryption, undo)
        placement = Placement(tuple(infos), transports)
        shapes_of_submeshes = [abstract_submesh(axes) for axes in submeshes]
        held = holdings(transports, infos, platform)
        groups_runtime = RayRuntime(processes, shapes_of_submeshes, topology, platform, held, max_in_flight)
        recoveries: list[RecoveryReport] = []
        runtime: RayRuntime | RecoveringRuntime = groups_runtime
        if recovery is None or replacements is None:
            groups_runtime.attach(ActorCalls(actors, processes, placement_groups, connections, infos, limits))
        else:
            gathering = topology.gathering
            fleet = Fleet(replacements, actors, placement, transport, encryption, gathering, timeout, limits)
            on_recovery = _noting(recoveries)
            runtime = RecoveringRuntime(groups_runtime, fleet, recovery, on_recovery, max_in_flight)
            runtime.attach(connections)
        undo.pop_all()
    return ClusterMesh(
        topology=topology,
        mpmd_axis_name=mpmd_axis,
        axis_types=axis_types_of(request),
        platform=platform,
        runtime=runtime,
        placement=placement,
        seconds=watch.seconds,
        recoveries=recoveries,
        on_close=on_close,
    )


def _environment_faults(runtime_env: Any) -> Iterator[Fault | None]:
    """The faults of Ray's runtime environment, as far as it is read here."""
    what = 'a dict as Ray takes it, such as {"env_vars": {"NAME": "value"}}'
    yield type_fault("runtime_env", runtime_env, Mapping, what, optional=True)
    variables = runtime_env.get("env_vars") if isinstance(runtime_env, Mapping) else None
    yield type_fault("runtime_env['env_vars']", variables, Mapping, "a dict of str", optional=True)
    if isinstance(variables, Mapping):
        for name, value in variables.items():
            yield str_fault("the name of a variable in runtime_env", name)
            yield str_fault(f"runtime_env['env_vars'][{name!r}]", value)


def _noting(recoveries: list[RecoveryReport]) -> Callable[[RecoveryReport], None]:
    """Adds each report to the list, and to the metrics of the driver."""
    metrics = RecoveryMetrics()

    def on_recovery(report: RecoveryReport) -> None:
        recoveries.append(report)
        metrics.add(report)

    return on_recovery


def _teams(processes: Sequence[Endpoint], num_spares: int) -> list[list[int]]:
    """The numbers of the processes of each group, and then of each spare."""
    groups: dict[int, list[int]] = {}
    for number, process in enumerate(processes):
        groups.setdefault(process.mpmd_idx, []).append(number)
    return [*groups.values(), *([len(processes) + spare] for spare in range(num_spares))]
