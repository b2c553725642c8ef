"""Curves of rates, floors, and merged exchanges."""

import dataclasses

import pytest

from mpmd.planner.all_reduces import AllReduces
from mpmd.planner.cluster import Cluster
from mpmd.planner.collectives import DeviceRange
from mpmd.planner.curves import Curve, ProductWork
from mpmd.planner.hardware import seconds_by_part
from mpmd.planner.submesh import Submesh
from mpmd.planner.trials.planned_costs import all_reduce_seconds
from mpmd.planner.trials.work_on_device import DeviceWork
from mpmd.simulate import Link

PLAIN = Cluster(1, 4, 1e12, 1e12, 1e10, Link(0.0, 1e9), Link(0.0, 1e9))


def test_a_kernel_of_half_runs_at_half_of_the_rate():
    curve = Curve(rate=1e12, half=1e9)
    assert curve.seconds(1e9, 1.0) == 1e9 / 0.5e12
    assert curve.seconds(8e12, 8.0) == pytest.approx(8 * curve.seconds(1e12, 1.0))


def test_products_have_the_rates_of_their_kind_and_dtype():
    rates = {"product bfloat16": Curve(4e12), "convolution float32": Curve(5e11)}
    cluster = dataclasses.replace(PLAIN, rates=rates)
    products = {
        "product bfloat16": ProductWork(4e12, 1.0),
        "convolution float32": ProductWork(1e12, 1.0),
        "product float32": ProductWork(1e12, 1.0),
    }
    assert seconds_by_part(cluster, 8e12, 0.0, 0.0, products) == (1.0 + 2.0 + 1.0 + 2.0, 0.0)


def test_products_read_memory_while_they_compute():
    assert seconds_by_part(PLAIN, 1e12, 0.5e10, 0.0) == (1.0, 0.0)
    assert seconds_by_part(PLAIN, 1e12, 2e10, 0.0) == (2.0, 0.0)


def test_a_task_takes_the_longer_of_computing_and_of_starting_its_kernels():
    cluster = dataclasses.replace(PLAIN, kernel_floor=0.5)
    assert seconds_by_part(cluster, 1e12, 0.0, 1e10, kernels=2.0) == (1.0, 1.0)
    assert seconds_by_part(cluster, 1e12, 0.0, 1e10, kernels=10.0) == (1.0, 4.0)


def test_all_reduces_of_a_plan_are_merged_as_those_of_a_layer():
    work = DeviceWork(1e12, 0.0, all_reduces={"model": AllReduces(3e9, 3, 2e9, 2)})
    devices = DeviceRange(0, Submesh(model=2))
    assert all_reduce_seconds(work, PLAIN, devices) == pytest.approx(3.0)
    merging = dataclasses.replace(PLAIN, merges_all_reduces=True)
    assert all_reduce_seconds(work, merging, devices) == pytest.approx(1.0)
