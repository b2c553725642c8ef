"""A cluster that is described for a plan."""

import pytest

import cluster
import mpmd
from mpmd.memory import Holding
from mpmd.planner import calibrate, calibrate_collectives
from mpmd.planner import cluster as planner_cluster


@pytest.mark.slow
def test_what_ray_says_and_actors_measure(local_ray, monkeypatch):
    small = {"TASK_SECONDS": 0.0, "ARRAY_BYTES": 2**12, "MESSAGE_BYTES": 2**12, "STEPS": 2}
    for name, value in small.items():
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(calibrate_collectives, "LARGE", (2**12, 2))
    # What is installed may be an older version; tests/planner/test_hardware.py reads the entry point.
    monkeypatch.setattr(planner_cluster, "_entry_point", lambda name: cluster.describe)
    read = mpmd.Cluster.from_ray(flops=1.0, memory_bandwidth=2.0, device_link=mpmd.simulate.Link())
    assert (read.nodes, read.devices_per_node, read.flops) == (1, 4, 1.0)
    assert read.memory > 2**20
    measured = mpmd.Cluster.from_ray(measure=True, cpus_per_device=0.25, devices_per_node=2)
    assert (measured.nodes, measured.devices_per_node) == (1, 2)
    assert min(measured.flops, measured.memory_bandwidth, measured.device_link.latency) > 0
    assert measured.holding is Holding.SLOTS
    assert {"all_reduce 2", "all_gather 2"} <= measured.rates.keys()
