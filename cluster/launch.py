"""Starts the groups: reserves resources, starts an actor for each process, and connects the actors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import jax
from jax.sharding import AxisType
from ray.util.placement_group import PlacementGroup

from cluster.driver.calls.actor_calls import ActorCalls
from cluster.driver.calls.liveness import TimeLimits
from cluster.driver.runtime import RayRuntime
from cluster.mesh import ClusterMesh
from cluster.metrics import RunMetrics
from cluster.process.actor import GroupActor
from cluster.process.compilation_cache import check_cache
from cluster.protocol.process_info import ProcessInfo
from cluster.protocol.versions import versions_here
from cluster.recovery.actor import RecoverableActor
from cluster.recovery.allocations import Allocations
from cluster.recovery.copies import Copies
from cluster.recovery.policy import Recovery, check_recovery, left_out_groups
from cluster.recovery.processes import Processes
from cluster.recovery.report import CorruptionReport, RecoveryReport
from cluster.recovery.runtime import RecoveringRuntime
from cluster.recovery.spares import Spares
from cluster.start.actors import ActorStarter
from cluster.start.connect import START_SECONDS, Connected, StartingActors, connect, open_groups
from cluster.start.environment import SHAREABLE_PLATFORMS, without_effect
from cluster.start.parts import alone_faults, are_shapes, groups_of_parts
from cluster.start.processes import PlannedProcesses, processes_of, runtime_envs_of
from cluster.start.ray_connection import connect_to_ray
from cluster.start.resources import (
    Reservation,
    remove_all,
    reserve_separately,
    reserve_together,
)
from cluster.start.shapes import (
    OPTIONAL_STR,
    LaunchRequest,
    axis_types_of,
    groups_faults,
    spares_fault,
    submeshes_of,
)
from cluster.transports.choice import AUTO, encryption_fault, holdings, transport_fault
from mpmd.compat import api_boundary
from mpmd.meshes.part import parts_faults
from mpmd.runtime.captures import collection_fault
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.util.stopwatch import Stopwatch
from mpmd.util.warn import warn_user
from mpmd.validation import (
    Fault,
    faults_of,
    int_fault,
    number_fault,
    path_fault,
    raise_faults,
    str_fault,
    type_fault,
)

COMPILATION_CACHE = "~/.cache/mpmd"

_RESOURCES_SECONDS = 60.0


@api_boundary
def launch(
    mesh_shape: Mapping[str, int] | None = None,
    mpmd_axis: str | None = None,
    *,
    groups: Sequence[Mapping[str, int]] | None = None,
    parts: Mapping[str, Mapping[str, int]] | Mapping[str, int] | None = None,
    axis_types: Mapping[str, AxisType] | AxisType | None = None,
    processes_per_group: int | Sequence[int] | None = None,
    platform: str | None = None,
    cpus_per_group: float | None = None,
    gpus_per_group: float | None = None,
    accelerator_types: Sequence[str] | str | None = None,
    address: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    transport: str = AUTO,
    encryption: bool | None = None,
    compilation_cache: str | os.PathLike[str] | None = COMPILATION_CACHE,
    recovery: Recovery | None = None,
    timeout: float | None = None,
    max_in_flight: int = MAX_IN_FLIGHT,
    step_timeout: float | None = None,
    stuck_after: float | None = None,
    load_timeout: float | None = None,
    capture: str | os.PathLike[str] | None = None,
) -> ClusterMesh:
    """Starts the actors of MPMD groups on a Ray cluster and returns the mesh of the groups.

    ``launch({"stage": 4, "fsdp": 2}, mpmd_axis="stage")`` makes four groups, each with a submesh of shape
    ``{"stage": 1, "fsdp": 2}``, and ``launch(groups=[{"data": 4}, {"data": 2, "model": 2}])`` two groups of
    different shapes. Uses the Ray that ``ray.init`` has connected to; without one, joins the cluster at
    ``address``, or at the environment's ``RAY_ADDRESS``, which is set in Ray jobs, or else starts Ray on this
    machine and says so. Closing the last mesh that uses such a Ray disconnects from it, or stops it.

    Args:
      mesh_shape: axis names and sizes of the whole mesh.
      mpmd_axis: the axis along which the groups are.
      groups: in place of both, for each group the axis names and sizes of its submesh. All submeshes have all
        of the axes; an axis that a group does not name has size 1.
      parts: names of parts of the mesh, for models of their own: ``mesh.part("actor")`` is what steps are
        compiled for. Each with its shape, in place of ``mesh_shape`` and ``groups``, as ``{"actor": {"stage":
        4}, "sampler": {"stage": 2, "model": 2}}``, whose groups are along ``mpmd_axis``, by default the first
        axis; or, beside them, with its number of groups.
      axis_types: ``jax.sharding.AxisType.Explicit`` for axes along which the types of values say within a
        step how they are sharded, as over a mesh of ``jax.make_mesh``: by name, or one for all axes. By
        default, and for axes that are not named, ``Auto``.
      processes_per_group: how many processes share the devices of a group, each on one node, or of each of
        the groups; by default one, or as few as the GPUs of each node allow.
      platform: ``cpu``, ``cuda``, ``rocm`` or another platform of JAX; by default ``cuda`` where the cluster
        has GPUs. On ``cpu`` a group's devices are slices of its host.
      cpus_per_group: CPUs to reserve for each group, fractions allowed, which its processes share evenly; by
        default one per process, or less where the cluster has fewer CPUs than processes. XLA's thread pool
        gets this size, or by default the size of the process's share of its node.
      gpus_per_group: GPUs to reserve for each group; by default one per device on ``cuda`` and ``rocm``. With
        a fraction, such as 0.25, groups of one device share a GPU, and each takes this fraction of the memory
        that JAX takes of a GPU: three quarters. ``XLA_PYTHON_CLIENT_MEM_FRACTION`` in ``runtime_env`` takes
        precedence.
      accelerator_types: the accelerator type of the nodes of each group, or one for all groups, as Ray names
        them: ``["H100", "H100", "A100"]``. By default groups are on any nodes.
      address: of the cluster to join, ``host:port`` or ``auto``, when Ray is not connected yet.
      runtime_env: Ray's runtime environment of the actors, such as ``{"env_vars": {...}}``. Variables of
        JAX's settings that steps have from the driver, such as ``JAX_DEBUG_NANS``, have no effect, and warn.
      transport: how groups exchange messages: ``shared_memory``, within a node; ``network``, by TCP between
        the memory of hosts; ``device``, JAX's transfers between devices, over a port at which anyone who
        reaches it can end the process; ``object_store``, Ray's; or ``auto``, which is ``shared_memory``
        within a node and ``network`` across nodes, where the system has them. With ``object_store`` the
        driver's requests are made by Ray, too, with Ray's encryption if that is on; else the driver connects
        with all processes by TCP.
      encryption: whether the TCP connections of groups with one another and with the driver are encrypted; by
        default those between machines. To encrypt takes processor time, and may be slower than the network:
        ``False`` is for networks that nobody else has access to. Transfers of ``device`` are never encrypted,
        nor are the collectives within a group of several processes.
      compilation_cache: a directory for JAX's persistent compilation cache, on each node or shared by all
        nodes; later runs load the executables of earlier runs. Other users may not write to it, because its
        content is executed; a missing one is made for its user alone. ``None`` keeps nothing. In
        ``runtime_env``, a ``JAX_COMPILATION_CACHE_DIR`` takes precedence.
      recovery: has the run go on when a group dies: ``mpmd.Recovery(every=10)``. By default that ends it.
      timeout: seconds to wait for the resources, and again for the actors to start; by default 60 and 300.
      max_in_flight: how many steps may be under way; the call of a further one waits until one is answered by
        all groups. Each holds its arguments, here and on the groups.
      step_timeout: seconds that a step may take, from the end of the step before. Then it is ended, and
        raises ``mpmd.errors.StepTimeoutError``; a group that does not leave it is killed. ``None`` is no
        limit.
      stuck_after: seconds that a process may be in one task of a step. Then its group is killed, and the step
        raises ``mpmd.errors.GroupStuckError``.
      load_timeout: seconds that a process may compile one executable, or do another part of loading a
        program, such as placing its constants. Then its group is killed, and loading raises that error.
      capture: a directory of the driver's machine in which each task that fails, or that makes a value which
        ``jax.debug_nans`` or ``jax.debug_infs`` refuses, gets a directory of its own, for ``mpmd replay``; at
        most ten tasks.

    Raises:
      ValueError: shapes, processes or resources are not valid, ``transport`` cannot connect the groups, or
        other users may write to the compilation cache.
      TypeError: an argument is of a wrong type.
      RuntimeError: the resources are not free within ``timeout``, an actor cannot start or be reached, or the
        processes and the driver do not have the same versions of JAX and Python.
      ConnectionError: there is no cluster at ``address``.
    """
    axis_of_groups, sizes = mpmd_axis, cast(Mapping[str, int] | None, parts)
    if are_shapes(parts):
        raise_faults(*alone_faults(mesh_shape, groups), title="mpmd.launch: ")
        axis_of_groups, groups, sizes = groups_of_parts(parts, mpmd_axis)
        mpmd_axis = None
    arguments = locals()  # each record takes its fields, whose annotations have their rules
    request = LaunchRequest(**{name: arguments[name] for name in LaunchRequest._fields})
    options = _Options(**{name: arguments[name] for name in _Options._fields})
    faults = [
        fault for record in (request, options) for fault in faults_of(type(record), record._asdict()) if fault
    ]
    if not any(isinstance(fault, TypeError) for fault in faults):
        of_groups = [fault for fault in groups_faults(request) if fault]
        faults += of_groups
        if not of_groups:
            faults += filter(None, _faults_between(request, options, sizes))
    raise_faults(*faults, title="mpmd.launch: ")
    left_out = left_out_groups(recovery, sizes)
    check_recovery(recovery, submeshes_of(request), left_out)
    check_cache(compilation_cache, options.variables)
    for text in without_effect(options.variables, jax.config):
        warn_user(text, UserWarning)
    watch = Stopwatch()
    with contextlib.ExitStack() as undo:
        with watch("ray"):
            on_close = connect_to_ray(address)
        undo.callback(on_close)
        processes = processes_of(request, recovery.spares if recovery else 0)
        with watch("resources"):
            reserve = reserve_separately if recovery else reserve_together
            reservations, nodes = reserve(
                processes.bundles, processes.teams, options.seconds(_RESOURCES_SECONDS)
            )
        placement_groups = {reservation.placement_group for reservation in reservations}
        undo.callback(remove_all, placement_groups)
        with watch("actors"):
            started = _start_actors(processes, reservations, nodes, request, options)
        with watch("transports"):
            connected = connect(started.actors, started.infos, transport, encryption)
        for connection in connected.connections:
            undo.enter_context(connection)
        recoveries: list[RecoveryReport] = []
        corruptions: list[CorruptionReport] = []
        runtime = _runtime_of(
            processes, started, connected, placement_groups, recoveries, corruptions, options, left_out
        )
        runtime.captures.directory = None if capture is None else Path(capture)
        metrics = RunMetrics(runtime.meters, recoveries)
        undo.pop_all()
    closing = contextlib.ExitStack()
    closing.callback(on_close)
    closing.callback(metrics.close)
    mesh = ClusterMesh(
        topology=connected.topology,
        mpmd_axis_name=axis_of_groups,
        axis_types=axis_types_of(request),
        platform=processes.platform,
        runtime=runtime,
        placement=connected.placement,
        seconds=watch.seconds,
        recoveries=recoveries,
        corruptions=corruptions,
        on_close=closing.close,
        parts=sizes,
    )
    metrics.start(runtime)
    return mesh


def _environment_faults(name: str, runtime_env: Any) -> Iterator[Fault | None]:
    what = 'a dict as Ray takes it, such as {"env_vars": {"NAME": "value"}}'
    yield type_fault(name, runtime_env, Mapping, what, optional=True)
    variables = runtime_env.get("env_vars") if isinstance(runtime_env, Mapping) else None
    yield type_fault(f"{name}['env_vars']", variables, Mapping, "a dict of str", optional=True)
    if isinstance(variables, Mapping):
        for variable, value in variables.items():
            yield str_fault(f"the name of a variable in {name}", variable)
            yield str_fault(f"{name}['env_vars'][{variable!r}]", value)


_RECOVERY = partial(type_fault, types=Recovery, what="mpmd.Recovery(...)", optional=True)
_PATH = partial(path_fault, optional=True)
_SECONDS = partial(number_fault, what="a number of seconds", above=0, optional=True)


class _Options(NamedTuple):
    address: Annotated[str | None, OPTIONAL_STR]
    runtime_env: Annotated[Mapping[str, Any] | None, _environment_faults]
    transport: Annotated[str, transport_fault]
    encryption: bool | None
    compilation_cache: Annotated[str | os.PathLike[str] | None, _PATH]
    recovery: Annotated[Recovery | None, _RECOVERY]
    timeout: Annotated[float | None, partial(_SECONDS, finite=True)]
    max_in_flight: Annotated[int, int_fault]
    step_timeout: Annotated[float | None, _SECONDS]
    stuck_after: Annotated[float | None, _SECONDS]
    load_timeout: Annotated[float | None, _SECONDS]
    capture: Annotated[str | os.PathLike[str] | None, _PATH]

    @property
    def variables(self) -> Mapping[str, str]:
        return (self.runtime_env or {}).get("env_vars") or {}

    @property
    def limits(self) -> TimeLimits:
        return TimeLimits(self.step_timeout, self.stuck_after, self.load_timeout)

    @property
    def cache_directory(self) -> str | None:
        return None if self.compilation_cache is None else os.fspath(self.compilation_cache)

    def seconds(self, default: float) -> float:
        return default if self.timeout is None else self.timeout


def _faults_between(
    request: LaunchRequest, options: _Options, parts: Mapping[str, int] | None
) -> Iterator[Fault | None]:
    yield encryption_fault(options.encryption, options.transport)
    yield collection_fault(options.capture)
    yield from parts_faults(parts, len(submeshes_of(request)))
    yield spares_fault(request, options.recovery.spares if options.recovery else 0)


class _Started(NamedTuple):
    actors: StartingActors
    infos: list[ProcessInfo]
    spares: Spares | None


def _start_actors(
    processes: PlannedProcesses,
    reservations: Sequence[Reservation],
    nodes: Sequence[str],
    request: LaunchRequest,
    options: _Options,
) -> _Started:
    recovery, endpoints = options.recovery, processes.endpoints
    share_after = None
    if recovery is not None and processes.platform in SHAREABLE_PLATFORMS:
        share_after = recovery.share_after
    runtime_env = options.runtime_env or {}
    runtime_envs = runtime_envs_of(processes, nodes, request, runtime_env, may_share=share_after is not None)
    actor_class = RecoverableActor if recovery else GroupActor
    starter = ActorStarter(processes, runtime_envs, options.cache_directory, actor_class)
    handles = [starter.start(number, reservations[number]) for number in range(len(endpoints))]
    spares = None
    if recovery is not None:
        mpmd_idxs = [endpoint.mpmd_idx for endpoint in endpoints]
        of_members, of_spares = reservations[: len(endpoints)], reservations[len(endpoints) :]
        seconds = options.seconds(_RESOURCES_SECONDS)
        allocations = Allocations(of_members, processes.bundles, mpmd_idxs, share_after, seconds)
        spares = Spares(starter, allocations, of_spares)
        spares.start_missing()
    start_seconds = options.seconds(START_SECONDS)
    actors = StartingActors(handles, endpoints, start_seconds)
    infos = open_groups(actors, versions_here())
    if spares is not None:
        spares.await_start(start_seconds)
    return _Started(actors, infos, spares)


def _runtime_of(
    processes: PlannedProcesses,
    started: _Started,
    connected: Connected,
    placement_groups: Collection[PlacementGroup],
    recoveries: list[RecoveryReport],
    corruptions: list[CorruptionReport],
    options: _Options,
    left_out: frozenset[int],
) -> RayRuntime | RecoveringRuntime:
    actors, infos, spares = started.actors.actors, started.infos, started.spares
    placement, connections = connected.placement, connected.connections
    groups = RayRuntime(
        processes.endpoints,
        processes.platform,
        holdings(placement.transports, infos, processes.platform),
        options.max_in_flight,
    )
    limits = options.limits
    if options.recovery is None or spares is None:
        groups.attach(ActorCalls(actors, processes.endpoints, placement_groups, connections, infos, limits))
        return groups
    running = Processes(spares, started.actors, connected, options.transport, options.encryption, limits)
    recovering = RecoveringRuntime(
        groups,
        running,
        Copies(running, left_out),
        options.recovery,
        recoveries.append,
        corruptions.append,
        options.max_in_flight,
        left_out,
    )
    recovering.attach(connections)
    return recovering
