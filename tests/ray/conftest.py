"""One local Ray for all tests, and meshes that tests share, because actors take seconds to start."""

import pytest
import ray

import cluster

PATIENCE = 200
"""Seconds that the actors of a shared mesh may take to start, on a machine that has much else to do."""


def launch(mesh_shape=None, **options):
    """A mesh of a test's own, by default of two groups of one device; all tests share four CPUs."""
    options = {"cpus_per_group": 0.25, "timeout": PATIENCE} | options
    return cluster.launch(mesh_shape or {"stage": 2}, "stage", **options)


@pytest.fixture(scope="session")
def local_ray():
    # Ray starts workers with a low priority, so whatever else a machine does would keep them from starting.
    # It starts some ahead, which have no environment of a group, and so no use.
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=300 * 2**20,
        _system_config={"worker_niceness": 0, "prestart_worker_first_driver": False},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def two_groups(local_ray):
    """Two groups of two devices each, with encrypted connections, as on two nodes. Tests leave it usable."""
    shape = {"stage": 2, "fsdp": 2}
    with launch(shape, cpus_per_group=0.5, transport="network", encryption=True) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def two_process_groups(local_ray):
    """Two groups of two processes, each with one of the group's two devices. Tests leave it usable.

    Each group is a part of the mesh, too.
    """
    parts = {"actor": 1, "sampler": 1}
    with launch({"stage": 2, "fsdp": 2}, processes_per_group=2, parts=parts) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def four_groups(local_ray):
    """Four groups of one device each. Tests leave it usable."""
    with launch({"stage": 4}) as mesh:
        yield mesh
