"""Clusters: given, read, and measured in this process."""

import dataclasses
import importlib.metadata
import tomllib
from pathlib import Path

import jax
import pytest

import mpmd
from mpmd.memory import Holding
from mpmd.planner.cluster import Cluster
from mpmd.planner.curves import Curve
from mpmd.planner.hardware import Hardware, completed
from mpmd.simulate import Link

GIVEN = {
    "nodes": 2,
    "devices_per_node": 4,
    "memory": 8e9,
    "flops": 1e12,
    "memory_bandwidth": 1e11,
    "device_link": Link(1e-6, 1e10),
    "node_link": Link(1e-5, 1e9),
}


def without(*names):
    return {name: value for name, value in GIVEN.items() if name not in names}


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ValueError) as error:
        Cluster(**{**GIVEN, "nodes": 0, "memory": -1.0, "flops": 0.0, "alone": 0.5})
    assert [line.split()[0] for line in str(error.value).splitlines()[1:]] == [
        "nodes",
        "memory",
        "flops",
        "alone",
    ]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("memory", "80GB", "memory must be a number of bytes above 0, not '80GB'"),
        ("device_link", 1e9, "device_link must be an mpmd.simulate.Link"),
        ("alone", "2", "alone must be a number of at least 1"),
    ],
)
def test_what_is_of_another_type_is_said(name, value, text):
    with pytest.raises(TypeError, match=text):
        Cluster(**{**GIVEN, name: value})


@pytest.mark.parametrize("name", ["memory", "flops", "memory_bandwidth", "task_overhead", "alone"])
def test_numbers_are_those_that_a_float_holds(name):
    with pytest.raises(ValueError, match=rf"{name} must be at most 1.8e\+308"):
        Cluster(**{**GIVEN, name: 10**400})
    if name != "memory":
        with pytest.raises(ValueError, match=f"{name} must be finite, not inf"):
            Cluster(**{**GIVEN, name: float("inf")})


def test_more_devices_than_any_mesh_has():
    with pytest.raises(ValueError, match=r"more than 10\*\*18 devices are more than a mesh can have"):
        Cluster(**{**GIVEN, "nodes": 10**30})


def test_a_file_may_say_where_messages_are():
    assert Cluster(**GIVEN, holding="slots").holding is Holding.SLOTS
    with pytest.raises(ValueError, match="holding must be one of 'receiver', "):
        Cluster(**GIVEN, holding="somewhere")


def test_what_is_given_is_taken_and_not_measured():
    cluster = completed({"nodes": 3, "devices_per_node": 4, "memory": 1.0}, GIVEN, None)
    assert cluster == Hardware(**GIVEN)
    given = {**without("nodes"), "flops": 5.0}
    cluster = completed({"nodes": 2}, given, lambda: {"flops": 7.0, "task_overhead": 1e-3})
    assert (cluster.flops, cluster.task_overhead) == (5.0, 1e-3)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, ["product float32", "all_reduce 2"]),
        ({"flops": 5.0}, ["all_reduce 2"]),
        ({"device_link": Link(0.0, 1e9)}, ["product float32"]),
        ({"rates": {}}, []),
    ],
)
def test_a_constant_from_the_user_takes_the_place_of_measured_curves(given, left):
    measured = {**GIVEN, "rates": {"product float32": Curve(7.0), "all_reduce 2": Curve(8.0)}}
    sizes = {name: measured.pop(name) for name in ("nodes", "devices_per_node", "memory")}
    cluster = completed(sizes, given, lambda: measured)
    assert [*cluster.rates] == left


def test_what_nobody_knows_is_named():
    with pytest.raises(ValueError, match=r"flops, node_link: give them, .* measure=True"):
        completed({}, without("flops", "node_link"), None)
    with pytest.raises(ValueError, match="no speed; it has nodes, "):
        completed({}, {**GIVEN, "speed": 1}, None)


def test_a_link_is_left_out_where_there_is_none():
    given = without("device_link", "node_link")
    assert Cluster(**{**given, "nodes": 1, "devices_per_node": 1}).nodes == 1
    one_node = Cluster(**{**given, "nodes": 1, "device_link": Link(1e-6, 1e10)})
    with pytest.raises(ValueError, match="node_link must be given where there are 2 nodes, as an mpmd"):
        dataclasses.replace(one_node, nodes=2)
    with pytest.raises(ValueError, match="device_link must be given where there are 4 devices on a node"):
        Cluster(**{**given, "nodes": 1})


def test_the_devices_of_this_process_are_one_node():
    given = without("nodes", "devices_per_node", "memory", "node_link")
    cluster = mpmd.Cluster.of_this_process(jax.devices()[:4], **given)
    assert (cluster.nodes, cluster.devices_per_node) == (1, 4)
    assert cluster.memory > 2**20
    with pytest.raises(ValueError, match="these are none"):
        mpmd.Cluster.of_this_process([], **given)


def test_ray_clusters_are_described_by_an_entry_point(monkeypatch):
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (value,) = pyproject["project"]["entry-points"]["mpmd.clusters"].values()
    point = importlib.metadata.EntryPoint("ray", value, "mpmd.clusters")
    assert callable(point.load())
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group, name: [])
    with pytest.raises(RuntimeError, match=r"no installed package .* pip install"):
        mpmd.Cluster.from_ray()


def test_a_part_is_devices_of_a_node_or_whole_nodes():
    whole = mpmd.Cluster(**{**GIVEN, "nodes": 4, "devices_per_node": 8})
    part = whole.part(4)
    assert (type(part), part.nodes, part.devices_per_node) == (mpmd.Cluster, 1, 4)
    assert (whole.part(24).nodes, whole.part(24).devices_per_node) == (3, 8)
    with pytest.raises(ValueError, match="12 are not whole nodes, of 8 devices each: take a multiple of 8"):
        whole.part(12)
    with pytest.raises(ValueError, match="num_devices must be a whole number from 1 to 32, not 33"):
        whole.part(33)
