"""The processes of the groups that ``launch`` is asked for, their resources and environments."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.protocol.endpoint import Endpoint, endpoints
from cluster.start.environment import actor_environment, gpu_memory
from cluster.start.ray_connection import default_platform
from cluster.start.resources import ACCELERATOR_TYPE, Bundle, fitting_cpus, live_nodes, threads_per_process
from cluster.start.shapes import GPU_PLATFORMS, MOST_PROCESSES, LaunchRequest, accelerator_types_of, shapes_of
from mpmd.ir.reshard import GroupShape
from mpmd.validation import counted

_SHARE_OF_TYPE = 0.001
"""The amount of the resource of a node's accelerator type, of which it has 1, that a process takes."""

_PROCESS_BYTES = 100 * 2**20
"""The least memory of a process with JAX, before it has any value."""


@dataclasses.dataclass(frozen=True)
class PlannedProcesses:
    """``bundles`` has the resources of each process, and then of each spare."""

    platform: str
    endpoints: tuple[Endpoint, ...]
    bundles: Sequence[Bundle]

    @property
    def teams(self) -> list[list[int]]:
        """The numbers of the processes of each group, and then of each spare."""
        groups: dict[int, list[int]] = {}
        for number, endpoint in enumerate(self.endpoints):
            groups.setdefault(endpoint.mpmd_idx, []).append(number)
        return [*groups.values(), *([spare] for spare in range(len(self.endpoints), len(self.bundles)))]


def processes_of(request: LaunchRequest, num_spares: int) -> PlannedProcesses:
    platform = request.platform or default_platform()
    shapes = shapes_of(request, platform, [node["Resources"].get("GPU", 0) for node in live_nodes()])
    return PlannedProcesses(platform, endpoints(shapes), bundles_of(request, platform, shapes, num_spares))


def bundles_of(
    request: LaunchRequest, platform: str, shapes: Sequence[GroupShape], num_spares: int
) -> list[Bundle]:
    """The resources to reserve for each process, and then for each spare.

    Raises: ``ValueError`` for more processes than the cluster can hold, however its CPUs are shared.
    """
    nodes = live_nodes()
    cpus_of_nodes = [node["Resources"].get("CPU", 0) for node in nodes]
    num_processes = sum(shape.num_processes for shape in shapes) + num_spares
    # Where each is to have a share of its own of CPUs or GPUs, a cluster may grow until all fit.
    is_shared = request.cpus_per_group is None and platform not in GPU_PLATFORMS
    check_room(num_processes, num_spares, nodes if is_shared and any(cpus_of_nodes) else ())
    fitting = fitting_cpus(cpus_of_nodes, num_processes)
    cpus_per_group, gpus_per_group = request.cpus_per_group, request.gpus_per_group
    bundles: list[Bundle] = []
    for shape, accelerator_type in zip(shapes, accelerator_types_of(request, len(shapes)), strict=True):
        bundle = {"CPU": cpus_per_group / shape.num_processes if cpus_per_group else fitting}
        if gpus_per_group:
            bundle["GPU"] = gpus_per_group / shape.num_processes
        elif gpus_per_group is None and platform in GPU_PLATFORMS:
            bundle["GPU"] = shape.devices_per_process
        if accelerator_type is not None:
            bundle[f"{ACCELERATOR_TYPE}{accelerator_type}"] = _SHARE_OF_TYPE
        bundles += [bundle] * shape.num_processes
    return bundles + bundles[:1] * num_spares


def check_room(num_processes: int, num_spares: int, nodes: Sequence[Mapping[str, Any]]) -> None:
    asked = f"{counted(num_processes)} processes are needed" + (
        f", {counted(num_spares)} of them spares" if num_spares else ""
    )
    if num_processes > MOST_PROCESSES:
        raise ValueError(
            f"{asked}, and a Ray cluster can have {MOST_PROCESSES}: ask for fewer groups or spares"
        )
    memory = [node["Resources"]["memory"] for node in nodes if "memory" in node["Resources"]]
    if memory and num_processes > (fitting := int(sum(memory) // _PROCESS_BYTES)):
        raise ValueError(
            f"{asked}, and the {len(memory)} node{'s' if len(memory) > 1 else ''} of the cluster have "
            f"{sum(memory) / 2**30:.1f} GiB of memory: room for {fitting} processes of "
            f"{_PROCESS_BYTES >> 20} MiB, the least that a process takes before it has any value. "
            "Ask for fewer groups, or add nodes"
        )


def runtime_envs_of(
    processes: PlannedProcesses,
    nodes: Sequence[str],
    request: LaunchRequest,
    runtime_env: Mapping[str, Any],
    may_share: bool,
) -> list[dict[str, Any]]:
    """``nodes`` has the node of each process. With ``may_share``, no group takes all memory of a device."""
    variables = runtime_env.get("env_vars") or {}
    shares_of_nodes = threads_per_process(nodes)
    runtime_envs = []
    for number, endpoint in enumerate(processes.endpoints):
        shape, num_threads = endpoint.shape, shares_of_nodes[number]
        if request.cpus_per_group:
            num_threads = int(max(request.cpus_per_group / shape.num_processes, 1))
        memory = {}
        if processes.platform in GPU_PLATFORMS:
            memory = gpu_memory(variables, processes.bundles[number].get("GPU"), may_share)
        environment = actor_environment(
            variables={**memory, **variables},
            xla_flags=os.environ.get("XLA_FLAGS", ""),
            platform=processes.platform,
            num_devices=shape.devices_per_process,
            num_threads=num_threads,
            num_processes=shape.num_processes,
        )
        runtime_envs.append({**runtime_env, "env_vars": environment})
    return runtime_envs
