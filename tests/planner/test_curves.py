"""Curves of rates, floors, and merged and hidden exchanges."""

import dataclasses

import pytest

import mpmd
from mpmd.planner.all_reduces import AllReduces
from mpmd.planner.candidate import Candidate
from mpmd.planner.cluster import Cluster
from mpmd.planner.collectives import DeviceRange
from mpmd.planner.curves import Curve, ProductWork
from mpmd.planner.hardware import seconds_by_part
from mpmd.planner.layer_profile import Division, Layer, TaskWork
from mpmd.planner.search.stages import CostModel
from mpmd.planner.submesh import Submesh
from mpmd.planner.trials.planned_costs import all_reduce_seconds
from mpmd.planner.trials.work_on_device import DeviceWork
from mpmd.simulate import Link
from tests.support.profiles import profile

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


def test_a_task_takes_the_longer_of_computing_and_of_starting_its_kernels():
    cluster = dataclasses.replace(PLAIN, kernel_floor=0.5)
    assert seconds_by_part(cluster, 1e12, 0.0, 1e10, kernels=2.0) == (1.0, 1.0)
    assert seconds_by_part(cluster, 1e12, 0.0, 1e10, kernels=10.0) == (1.0, 4.0)


def seconds_of(cluster, division, submesh, fsdp=False, gather_once=False, number=4, **layer):
    """The seconds of the tasks of a layer with one second of computing each, in a group."""
    of_task = TaskWork(1e12, 0.0)
    fields = {"weights": 0, "state": 0, "gradients": 0, "residuals": 0, "entering": 0, **layer}
    made = profile((Layer("", of_task, of_task, **fields, divisions=division),), rows=4)
    model = CostModel(made, cluster)
    device_range, settings = (
        DeviceRange(0, Submesh.of(submesh)),
        Candidate((), (), mpmd.GPipe(1), number, False, fsdp, gather_once),
    )
    table = model.table(model.group_settings(device_range, settings))
    return table.total("forward"), table.total("backward")


def test_each_all_reduce_has_its_floor_and_its_latency():
    cluster = dataclasses.replace(PLAIN, collective_floor=0.25, device_link=Link(0.125, 1e9))
    division = {"model": Division(4, 0.0, 0.0, 0.0, forward=AllReduces(1e9, 3.0))}
    forward, backward = seconds_of(cluster, division, {"model": 2})
    assert forward == pytest.approx(1 + 1.0 + 3 * (2 * 0.125 + 0.25)) and backward == 1


def test_merged_all_reduces_count_once_where_xla_merges_them():
    division = {"model": Division(4, 0.0, 0.0, 0.0, backward=AllReduces(3e9, 3, 2e9, 2))}
    assert seconds_of(PLAIN, division, {"model": 2})[1] == pytest.approx(1 + 3.0)
    merging = dataclasses.replace(PLAIN, merges_all_reduces=True)
    assert seconds_of(merging, division, {"model": 2})[1] == pytest.approx(1 + 1.0)


@pytest.mark.parametrize("rows", [1, 4])
def test_sums_of_gradients_are_as_large_for_any_number_of_rows(rows):
    """Gradients of 2e9 bytes, which two devices along ``model`` divide, and 1e9 bytes of values of a row."""
    of_data = Division(4, 0.0, 0.0, 0.0, backward=AllReduces(3e9), summed_gradients=2e9)
    division = {"data": of_data, "model": Division(4, 0.0, 1.0, 0.0)}
    for flags, gradients in (({}, 1), ({"fsdp": True}, 0), ({"fsdp": True, "gather_once": True}, 1)):
        made = seconds_of(PLAIN, division, {"data": 2, "model": 2}, number=4 // rows, **flags)[1]
        assert made == pytest.approx(rows + (rows * 1e9 + gradients * 1e9) / 1e9), flags


@pytest.mark.parametrize("nbytes", [1.5e9, 4.5e9])
def test_computing_hides_gathers_where_xla_overlaps_them(nbytes):
    layer = {"weights": nbytes, "gradients": nbytes}
    division = {"data": Division(4, 0.0, 0.0, 1.0)}
    gather, adding = nbytes / 2 / 1e9, nbytes / 2 / 1e10
    forward, backward = seconds_of(PLAIN, division, {"data": 2}, fsdp=True, **layer)
    computing = max(1.0, 2 * nbytes / 1e10) + adding
    assert (forward, backward) == pytest.approx((1 + gather, computing + 2 * gather))
    hiding = dataclasses.replace(PLAIN, overlaps_gathers=True)
    hidden = seconds_of(hiding, division, {"data": 2}, fsdp=True, **layer)
    assert hidden == pytest.approx((max(1.0, gather), max(computing, 2 * gather)))


def test_weights_are_gathered_in_the_dtype_in_which_they_are_read():
    division = {"data": Division(4, 0.0, 0.0, 1.0)}
    whole = {"weights": 4_000_000_000}
    seconds = [
        seconds_of(PLAIN, division, {"data": 2}, fsdp=True, **layer)[0]
        for layer in (whole, {**whole, "gathered": 2_000_000_000})
    ]
    assert seconds == pytest.approx([1 + 2.0, 1 + 1.0])


def test_exchanges_of_a_plan_are_merged_and_hidden_as_those_of_a_layer():
    all_reduces = {"model": AllReduces(3e9, 3, 2e9, 2), "data": AllReduces(1e9, 1, moved=1e9)}
    work = DeviceWork(1e12, 0.0, all_reduces=all_reduces)
    devices = DeviceRange(0, Submesh(model=2, data=2))
    assert all_reduce_seconds(work, PLAIN, devices) == pytest.approx(4.0)
    merging = dataclasses.replace(PLAIN, merges_all_reduces=True)
    assert all_reduce_seconds(work, merging, devices) == pytest.approx(2.0)
    hiding = dataclasses.replace(merging, overlaps_gathers=True)
    assert all_reduce_seconds(work, hiding, devices) == pytest.approx(1.0)
