"""One local Ray for all tests, and meshes that tests share, because actors take seconds to start."""

import pytest
import ray

import cluster

PATIENCE = 200
"""Seconds that the actors of a shared mesh may take to start, on a machine that has much else to do."""


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
    options = {"transport": "network", "encryption": True, "timeout": PATIENCE}
    with cluster.launch({"stage": 2, "fsdp": 2}, "stage", cpus_per_group=0.5, **options) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def two_process_groups(local_ray):
    """Two groups of two processes, each with one of the group's two devices. Tests leave it usable.

    Each group is a part of the mesh, too.
    """
    with cluster.launch(
        {"stage": 2, "fsdp": 2},
        "stage",
        processes_per_group=2,
        parts={"actor": 1, "sampler": 1},
        cpus_per_group=0.25,
        timeout=PATIENCE,
    ) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def four_groups(local_ray):
    """Four groups of one device each. Tests leave it usable."""
    with cluster.launch({"stage": 4}, "stage", cpus_per_group=0.25, timeout=PATIENCE) as mesh:
        yield mesh
