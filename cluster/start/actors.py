"""Starts the actors of a mesh's processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.process.actor import GroupActor
from cluster.start.environment import visible_devices
from cluster.start.processes import PlannedProcesses
from cluster.start.resources import Allocation, Reservation


class ActorStarter:
    def __init__(
        self,
        processes: PlannedProcesses,
        runtime_envs: Sequence[Mapping[str, Any]],
        compilation_cache: str | None,
        actor_class: type[GroupActor],
    ):
        self.endpoints = processes.endpoints
        self.bundles = processes.bundles
        self._runtime_envs = runtime_envs
        self._compilation_cache = compilation_cache
        self._actor_class = ray.remote(concurrency_groups=dict(actor_class.CONCURRENCY_GROUPS))(actor_class)  # type: ignore[call-overload]

    def start(self, number: int, allocation: Allocation) -> ActorHandle:
        bundle, runtime_env = self.bundles[number], dict(self._runtime_envs[number])
        if isinstance(allocation, Reservation):
            cpus, gpus = bundle["CPU"], bundle.get("GPU", 0)
            where: Any = PlacementGroupSchedulingStrategy(allocation.placement_group, allocation.bundle_index)
        else:
            cpus = gpus = 0
            where = NodeAffinitySchedulingStrategy(allocation.node_id, soft=False)
            variables = runtime_env["env_vars"]
            shown = visible_devices(variables["JAX_PLATFORMS"], allocation.accelerators)
            runtime_env["env_vars"] = {**variables, **shown}
        return self._actor_class.options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,  # a restarted process would not have the group's values
            scheduling_strategy=where,
            runtime_env=runtime_env,
        ).remote(self.endpoints[number], self._compilation_cache)
