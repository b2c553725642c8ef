"""The devices of a group, as JAX has them in one of its processes."""

from __future__ import annotations

import os

import jax
import numpy as np

from mpmd.ir.reshard import GroupShape


def submesh_of(mpmd_idx: int, shape: GroupShape) -> jax.sharding.Mesh:
    """The group's submesh; each of several processes gives it as many of its devices.

    Raises: ``RuntimeError`` when a process has too few, or none of its platform.
    """
    needed = shape.devices_per_process
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # what JAX raises depends on which plugins it found
        platform = os.environ["JAX_PLATFORMS"]
        raise RuntimeError(f"JAX finds no devices of the platform {platform!r} here: {error!r}") from error
    if len(devices) < needed:
        raise RuntimeError(
            f"group {mpmd_idx} needs {needed} devices in each process for its submesh "
            f"{dict(shape.axes)}, but this one has {len(devices)}: {', '.join(map(str, devices))}"
        )
    taken = [d for process in range(jax.process_count()) for d in jax.local_devices(process)[:needed]]
    return jax.sharding.Mesh(np.array(taken).reshape(tuple(shape.axes.values())), tuple(shape.axes))
