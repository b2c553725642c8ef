"""Rates and links of the devices of a mesh."""

import functools
import itertools
import math

import jax
import numpy as np
import pytest

import mpmd
from mpmd.ir.events import Event
from mpmd.ir.plan import Task
from mpmd.planner import calibrate, calibrate_collectives
from mpmd.planner.curves import Curve
from mpmd.planner.record_steps import record_steps
from mpmd.simulate import Link


def small(monkeypatch):
    """What is measured takes little time, and tells little."""
    for name, value in {
        "TASK_SECONDS": 0.0,
        "ARRAY_BYTES": 2**12,
        "MESSAGE_BYTES": 2**12,
        "STEPS": 2,
        "ROUNDS": 2,
    }.items():
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(calibrate, "SMALLEST_WIDTH", 16)


@pytest.mark.usual("1")
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_all_is_measured_that_such_a_mesh_has(monkeypatch, groups):
    small(monkeypatch)
    devices = [jax.sharding.Mesh(np.array([device]), ("device",)) for device in jax.devices()[:groups]]
    with mpmd.MpmdMesh(devices) as mesh:
        nodes = [0, 0, 1, 1][:groups]
        found = calibrate.calibrate(functools.partial(record_steps, mesh), nodes)
    numbers = ("flops", "memory_bandwidth", "task_overhead", "kernel_floor")
    assert min(found[name] for name in numbers) > 0 and found["alone"] >= 1
    kinds = ("product", "batched_product", "convolution")
    assert [*found["rates"]] == [f"{kind} float32" for kind in kinds]
    assert min(curve.rate for curve in found["rates"].values()) > 0
    links = {1: set(), 2: {"device_link"}, 4: {"device_link", "node_link"}}[groups]
    assert {*found} == {*numbers, "alone", "rates", *links}


def test_a_disturbed_round_does_not_count(monkeypatch):
    rounds = iter([(100.0, 9.0), (40.0, 1.9), (110.0, 1.7)])

    def square_products(groups, dtype):
        flops, alone = next(rounds)
        return calibrate._SquareProducts(flops, Curve(flops), alone)

    others = itertools.cycle([70.0, 10.0, 80.0])
    monkeypatch.setattr(calibrate, "_square_products", square_products)
    monkeypatch.setattr(calibrate, "_flops_of_others", lambda *_: next(others))
    monkeypatch.setattr(calibrate, "_task_seconds", lambda groups, work: 1.0)
    monkeypatch.setattr(calibrate, "_task_overhead", lambda groups: 1.0)
    found = calibrate.calibrate(lambda *_: [], [0])
    assert (found["flops"], found["alone"]) == (100.0, 1.9)
    rates = {"product": 100.0, "batched_product": 70.0, "convolution": 70.0}
    assert found["rates"] == {f"{kind} float32": Curve(rate) for kind, rate in rates.items()}


def test_a_hop_is_half_of_what_is_not_computing():
    # The second group's clock is 100 s ahead. A message takes 2 s, and the second group copies for 1 s.
    events = [
        Event(0, Task("fwd", 0, 0), 0.0, 5.0),
        Event(1, Task("fwd", 1, 0), 107.0, 113.0),
        Event(1, Task("bwd", 1, 0), 113.0, 117.0),
        Event(0, Task("bwd", 0, 0), 19.0, 23.0),
    ]
    assert calibrate._hops_of(events, 2) == [2.0 + 1.0]


def test_a_curve_goes_through_a_small_and_a_large_kernel():
    curve = Curve(rate=1e9, half=1e6)
    points = [(operations, curve.seconds(operations, 1.0)) for operations in (1e6, 1e9)]
    through = Curve.through(*points)
    assert (through.rate, through.half) == pytest.approx((1e9, 1e6))
    assert Curve.through((1e6, 0.5e-3), (1e9, 1.0)) == Curve(1e9)  # small ones are in caches


@pytest.mark.usual("4-sizes0")
@pytest.mark.parametrize(("devices", "sizes"), [(4, [2, 4]), (3, [3])])
def test_collectives_are_measured_along_the_axes_of_a_node(monkeypatch, devices, sizes):
    monkeypatch.setattr(calibrate_collectives, "SMALL", (64, 2))
    monkeypatch.setattr(calibrate_collectives, "LARGE", (2**12, 2))
    axes = calibrate_collectives.group_axes(devices)
    group = jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(*axes.values()), tuple(axes))
    with mpmd.MpmdMesh([group]) as mesh:
        rates = calibrate_collectives.collective_rates(functools.partial(record_steps, mesh), axes)
    names = [f"{kind} {size}" for size in sizes for kind in ("all_reduce", "all_gather")]
    assert [*rates] == names and min(curve.rate for curve in rates.values()) > 0


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_each_collective_of_a_measured_task_is_in_its_executable(kind):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("outer", "inner"))
    options = {"axes": ("inner",), "size": 2, "nbytes": 2**12, "count": 4}
    work = functools.partial(calibrate_collectives._repeated, kind=kind, **options)
    with jax.set_mesh(mesh):
        compiled = jax.jit(work).lower(np.float32(1)).compile()
        assert compiled(np.float32(3)) == 3
    assert kind.replace("_", "-") in compiled.as_text()


def test_a_link_is_what_small_and_large_messages_take():
    size = calibrate.MESSAGE_BYTES
    assert calibrate._link(0.5, 2.5) == Link(0.5, size / 2)
    assert calibrate._link(-0.1, 2.0) == Link(0.0, size / 2)
    assert calibrate._link(0.5, 0.25) == Link(0.5, math.inf)
