"""Runs steps of a calibration and records their events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mpmd.ir.events import Event
from mpmd.meshes.group_mesh import GroupMesh
from mpmd.step.jit import jit


def record_steps(
    mesh: GroupMesh, step: Callable[..., Any], args: tuple[Any, ...], count: int
) -> list[tuple[Event, ...]]:
    """Runs a step ``count`` times on the groups of a mesh, after one run that is not counted.

    Returns: the events of each run.
    """
    compiled = jit(step, mesh).compile(*args)
    jax.block_until_ready(compiled(*args))
    events_of_runs = []
    for _ in range(count):
        result, events = compiled.profile(*args)
        jax.block_until_ready(result)
        events_of_runs.append(events)
    return events_of_runs
