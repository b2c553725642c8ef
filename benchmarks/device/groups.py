"""Groups on the devices of this machine: in this process, or on Ray, where they may share a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
import ray

import cluster
import mpmd
from benchmarks.device.settings import Settings
from benchmarks.workload import available_cores

START_SECONDS = 120.0
CPUS = 4


def in_process(groups: int, **axes: int) -> mpmd.MpmdMesh:
    """Groups of this process's devices, each with the axes of a submesh."""
    shape = (groups, *axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage", *axes)), "stage")


@contextlib.contextmanager
def local_ray(settings: Settings) -> Iterator[None]:
    """A Ray of its own. CPUs count as one GPU, so that groups have parts of it as on a machine with one."""
    ray.init(
        address="local",
        num_cpus=max(available_cores(), CPUS),
        num_gpus=settings.devices if settings.is_gpu else 1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2**30,
    )
    try:
        yield
    finally:
        ray.shutdown()


def on_ray(settings: Settings, groups: int, **options) -> cluster.ClusterMesh:
    """Groups of one device each, of which four share a device where there are too few."""
    arguments = {
        "platform": settings.platform,
        "cpus_per_group": CPUS / 8,
        "gpus_per_group": settings.gpus_of(groups),
        "timeout": START_SECONDS,
    }
    return cluster.launch({"stage": groups}, "stage", **arguments | options)
