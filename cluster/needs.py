"""What processes need wherever they run: resources, and an environment that has their devices and threads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.endpoint import Member
from cluster.environment import actor_environment, gpu_memory
from cluster.resources import Bundle, fitting_cpus, live_nodes, threads_per_process
from cluster.shapes import GPU_PLATFORMS, MOST_PROCESSES, Request
from mpmd.ir.reshard import GroupShape
from mpmd.validation import counted

_PROCESS_BYTES = 100 * 2**20
"""The least memory of a process with JAX, before it has any value."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """What one process needs: resources, by Ray's names, and its environment."""

    resources: Bundle
    runtime_env: Mapping[str, Any]


def bundles_of(
    request: Request, platform: str, shapes: Sequence[GroupShape], num_spares: int
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
    for shape in shapes:
        bundle = {"CPU": cpus_per_group / shape.num_processes if cpus_per_group else fitting}
        if gpus_per_group:
            bundle["GPU"] = gpus_per_group / shape.num_processes
        elif gpus_per_group is None and platform in GPU_PLATFORMS:
            bundle["GPU"] = shape.devices_per_process
        bundles += [bundle] * shape.num_processes
    return bundles + bundles[:1] * num_spares


def check_room(num_processes: int, num_spares: int, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raises ``ValueError`` for more processes than Ray can have, or than the memory of these nodes holds."""
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
