"""Finds, checks and measures this process's devices."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpmd.meshes.mesh import MpmdMesh, devices_faults
from mpmd.planner.calibrate import calibrate
from mpmd.planner.calibrate import dtype_fault as dtype_fault
from mpmd.planner.calibrate_collectives import collective_rates, group_axes
from mpmd.planner.record_steps import record_steps
from mpmd.validation import raise_faults


def checked(devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """The devices, by default all of this process. Raises ``ValueError`` for none, and for several kinds."""
    raise_faults(*devices_faults(devices))
    devices = jax.local_devices() if devices is None else list(devices)
    kinds = sorted({f"{device.platform} ({device.device_kind})" for device in devices})
    if len(kinds) != 1:
        raise ValueError(
            f"a cluster has devices of one kind, and these are {' and '.join(kinds) or 'none'}: "
            "give devices=jax.devices(...)"
        )
    return devices


def memory_of(devices: Sequence[jax.Device]) -> float:
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [limit for limit in limits if limit]
    if len(known) == len(devices):
        return float(min(known))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(devices)


def measured(devices: Sequence[jax.Device], dtype: str) -> dict[str, Any]:
    meshes = [jax.sharding.Mesh(np.array([device]), ("device",)) for device in devices]
    with MpmdMesh(meshes) as mesh:
        known = calibrate(functools.partial(record_steps, mesh), [0] * len(devices), dtype)
    if len(devices) == 1:
        return known
    axes = group_axes(len(devices))
    of_group = jax.sharding.Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))
    with MpmdMesh([of_group]) as mesh:
        collectives = collective_rates(functools.partial(record_steps, mesh), axes)
    return known | {"rates": known["rates"] | collectives}
