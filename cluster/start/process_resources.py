"""The resources of processes wherever they run, and an environment that has their devices and threads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.start.environment import actor_environment, gpu_memory
from cluster.start.processes import PlannedProcesses
from cluster.start.resources import Bundle, threads_per_process
from cluster.start.shapes import GPU_PLATFORMS, LaunchRequest


@dataclasses.dataclass(frozen=True)
class ProcessResources:
    bundle: Bundle
    runtime_env: Mapping[str, Any]


def resources_of(
    processes: PlannedProcesses,
    nodes: Sequence[str],
    request: LaunchRequest,
    runtime_env: Mapping[str, Any],
    may_share: bool,
) -> list[ProcessResources]:
    """``nodes`` has the node of each process. With ``may_share``, no group takes all memory of a device."""
    variables = runtime_env.get("env_vars") or {}
    shares_of_nodes = threads_per_process(nodes)
    resources = []
    for number, endpoint in enumerate(processes.endpoints):
        bundle, shape, num_threads = processes.bundles[number], endpoint.shape, shares_of_nodes[number]
        if request.cpus_per_group:
            num_threads = int(max(request.cpus_per_group / shape.num_processes, 1))
        memory = {}
        if processes.platform in GPU_PLATFORMS:
            memory = gpu_memory(variables, bundle.get("GPU"), may_share)
        environment = actor_environment(
            variables={**memory, **variables},
            xla_flags=os.environ.get("XLA_FLAGS", ""),
            platform=processes.platform,
            num_devices=shape.devices_per_process,
            num_threads=num_threads,
            num_processes=shape.num_processes,
        )
        resources.append(ProcessResources(bundle, {**runtime_env, "env_vars": environment}))
    return resources
