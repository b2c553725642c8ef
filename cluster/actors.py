"""Starts the actors of a mesh's processes, and later those that take the place of dead ones."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actor import CONCURRENCY_GROUPS, GroupActor, Member
from cluster.recoverable_actor import RECOVERABLE_CONCURRENCY_GROUPS, RecoverableActor


@dataclasses.dataclass(frozen=True)
class Reserved:
    """What a process was promised: its bundle in the placement group, and its environment."""

    bundle_index: int
    resources: Mapping[str, float]
    runtime_env: Mapping[str, Any]


class ActorStarter:
    """Starts actors in the bundles of a placement group.

    Args:
      placement_group: with a bundle for each process, and for each spare.
      members: the processes, in the order of their numbers.
      reserved: for each of them, and then for each spare.
      compilation_cache: as of ``GroupActor``.
      recoverable: whether the processes take part in recovery.
    """

    def __init__(
        self,
        placement_group: PlacementGroup,
        members: Sequence[Member],
        reserved: Sequence[Reserved],
        compilation_cache: str | None,
        recoverable: bool,
    ):
        self.placement_group = placement_group
        self.members = tuple(members)
        self._reserved = list(reserved[: len(members)])
        self._free = list(reserved[len(members) :])
        self._compilation_cache = compilation_cache
        self._lock = threading.Lock()
        self._spares: list[tuple[ActorHandle, Reserved, ray.ObjectRef]] = []
        groups = RECOVERABLE_CONCURRENCY_GROUPS if recoverable else CONCURRENCY_GROUPS
        actor_class = RecoverableActor if recoverable else GroupActor
        self._actor_class = ray.remote(concurrency_groups=groups)(actor_class)  # type: ignore[call-overload]

    def start(self, number: int) -> ActorHandle:
        """Starts the actor of a process, in its bundle; where its node is gone, Ray moves the bundle."""
        return self._start(self.members[number], self._reserved[number])

    def _start(self, member: Member, reserved: Reserved) -> ActorHandle:
        return self._actor_class.options(
            num_cpus=reserved.resources["CPU"],
            num_gpus=reserved.resources.get("GPU", 0),
            max_restarts=0,  # a restarted process would not have the group's values
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement_group, reserved.bundle_index),
            runtime_env=dict(reserved.runtime_env),
        ).remote(member, self._compilation_cache)

    def start_spares(self) -> None:
        """Starts a spare process in each bundle that is free. Does not wait for them."""
        with self._lock:
            while self._free:
                reserved = self._free.pop()
                actor = self._start(self.members[0], reserved)
                self._spares.append((actor, reserved, actor.warm_up.remote()))

    def await_spares(self, timeout: float) -> None:
        """Waits until the spares are ready. Raises ``RuntimeError`` when they are not in time."""
        starting = [ready for _, _, ready in self._spares]
        _, late = ray.wait(starting, num_returns=len(starting), timeout=timeout) if starting else ([], [])
        if late:
            raise RuntimeError(f"{len(late)} spare processes did not start within {timeout:g} s")
        ray.get(starting)

    def replace(self, number: int) -> ActorHandle:
        """The actor that takes a dead process's place: a spare that is ready, or else a new one."""
        with self._lock:
            for spare in list(self._spares):
                actor, reserved, ready = spare
                if not ray.wait([ready], timeout=0)[0]:
                    continue
                self._spares.remove(spare)
                if _has_failed(ready):
                    self._free.append(reserved)
                    continue
                self._free.append(self._reserved[number])
                self._reserved[number] = reserved
                actor.adopt.remote(self.members[number])
                return actor
            return self.start(number)


def _has_failed(call: ray.ObjectRef) -> bool:
    try:
        ray.get(call)
    except ray.exceptions.RayError:
        return True
    return False
