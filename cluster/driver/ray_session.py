"""One connection of this process to Ray, and calls that are safe after it has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group


class RaySession:
    """The connection to Ray that this process has now. It ends with ``ray.shutdown``."""

    def __init__(self) -> None:
        self._identity = _identity()

    @property
    def is_connected(self) -> bool:
        return _identity() == self._identity

    def kill(self, actor: ActorHandle) -> None:
        """Kills an actor; after the end of the session Ray has done so."""
        with contextlib.suppress(ray.exceptions.RayError):  # Ray may be shutting down at this moment
            if self.is_connected:
                ray.kill(actor)

    def remove(self, placement_groups: Iterable[PlacementGroup]) -> None:
        if self.is_connected:
            for placement_group in list(placement_groups):
                remove_placement_group(placement_group)


def _identity() -> tuple[str, str] | None:
    """Differs for every connection of this process to Ray; ``None`` while there is none."""
    try:
        # Not ray.get_runtime_context, which starts Ray where there is none.
        context = ray.runtime_context.get_runtime_context()
        return context.get_node_id(), context.get_job_id()
    except Exception:  # the type depends on how far Ray has shut down
        return None
