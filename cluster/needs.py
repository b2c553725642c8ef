"""What processes need wherever they run: resources, and an environment that has their devices and threads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.endpoint import Member
from cluster.environment import actor_environment, gpu_memory
from cluster.resources import Bundle, fitting_cpus, live_nodes, threads_per_process
from cluster.shapes import GPU_PLATFORMS, Request
from mpmd.reshard import GroupShape


@dataclasses.dataclass(frozen=True)
class Needs:
    """What one process needs: resources, by Ray's names, and its environment."""

    resources: Bundle
    runtime_env: Mapping[str, Any]


def bundles_of(
    request: Request, platform: str, shapes: Sequence[GroupShape], num_spares: int
) -> list[Bundle]:
    """The resources to reserve for each process, and then for each spare."""
    cpus_of_nodes = [node["Resources"].get("CPU", 0) for node in live_nodes()]
    num_processes = sum(shape.num_processes for shape in shapes) + num_spares
    fitting = fitting_cpus(cpus_of_nodes, num_processes)
    cpus_per_group, gpus_per_group = request.cpus_per_group, request.gpus_per_group
    bundles: list[Bundle] = []
    for shape in shapes:
        bundle = {"CPU": cpus_per_group / shape.num_processes if cpus_per_group else fitting}
        if gpus_per_group:
            bundle["GPU"] = gpus_per_group / shape.num_processes
        elif gpus_per_group is None and platform in GPU_PLATFORMS:
            bundle["GPU"] = shape.devices_per_process
        bundles += [bundle] * shape.num_processes
    return bundles + bundles[:1] * num_spares


def needs_of(
    members: Sequence[Member],
    bundles: Sequence[Bundle],
    nodes: Sequence[str],
    request: Request,
    platform: str,
    runtime_env: Mapping[str, Any],
    shares: bool,
) -> list[Needs]:
    """What each process needs.

    Args:
      members: the processes.
      bundles, nodes: the resources that are reserved for each, and where; and for spares behind them.
      runtime_env: the user's.
      shares: whether groups may share a device. Then none of them is to take all of its memory.
    """
    given = dict(runtime_env)
    variables = given.get("env_vars") or {}
    shares_of_nodes = threads_per_process(nodes)
    needs = []
    for number, member in enumerate(members):
        shape, num_threads = member.shape, shares_of_nodes[number]
        if request.cpus_per_group:
            num_threads = int(max(request.cpus_per_group / shape.num_processes, 1))
        of_memory = {}
        if platform in GPU_PLATFORMS:
            of_memory = gpu_memory(variables, bundles[number].get("GPU"), shares)
        environment = actor_environment(
            given={**of_memory, **variables},
            xla_flags=os.environ.get("XLA_FLAGS", ""),
            platform=platform,
            num_devices=shape.devices_per_process,
            num_threads=num_threads,
            num_processes=shape.num_processes,
        )
        needs.append(Needs(bundles[number], {**given, "env_vars": environment}))
    return needs
