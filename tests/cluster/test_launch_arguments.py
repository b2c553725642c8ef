"""Meshes that ``launch`` is asked for: what it refuses before it connects, and what groups get."""

import jax
import pytest
import ray

import cluster
from cluster.mesh import abstract_submesh
from cluster.shapes import submeshes_of


@pytest.mark.parametrize(
    ("shape", "axis", "message"),
    [
        ({"stage": 2}, "stages", "no axis 'stages'; its axes are stage"),
        ({}, "stage", "no axis 'stage'"),
        ({"stage": 0}, "stage", "'stage' must be a positive int, not 0"),
        ({"stage": 2, "fsdp": -1}, "stage", "'fsdp' must be a positive int, not -1"),
        ({"stage": 2, "fsdp": 1.5}, "stage", "'fsdp' must be a positive int, not 1.5"),
        ({"stage": True}, "stage", "must be a positive int, not True"),
    ],
)
def test_shapes_that_are_no_mesh(shape, axis, message):
    with pytest.raises(ValueError, match=message):
        cluster.launch(shape, axis)


@pytest.mark.parametrize(("name", "value"), [("cpus_per_group", 0), ("gpus_per_group", -1)])
def test_impossible_amounts_of_resources(name, value):
    with pytest.raises(ValueError, match=f"{name} must"):
        cluster.launch({"stage": 2}, "stage", **{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs mesh_shape and mpmd_axis, or groups"),
        ({"mesh_shape": {"stage": 2}}, "needs mesh_shape and mpmd_axis"),
        ({"groups": []}, "groups is empty"),
        ({"groups": [{"data": 2}], "mpmd_axis": "stage"}, "and not both"),
        (
            {"groups": [{"data": 0}, {"model": "2"}]},
            "group 0: .* positive int, not 0\ngroup 1: .*'2'",
        ),
        ({"groups": [{"data": 4}, {"data": 3}], "processes_per_group": 2}, "the 3 devices of group 1 do not"),
        ({"groups": [{"data": 4}], "processes_per_group": [2, 2]}, "has 2 numbers, but there are 1 groups"),
    ],
    ids=str,
)
def test_groups_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        cluster.launch(**arguments)


def test_submeshes_have_all_axes():
    assert submeshes_of(None, None, [{"data": 4}, {"model": 2, "data": 2}]) == [
        {"data": 4, "model": 1},
        {"data": 2, "model": 2},
    ]
    assert submeshes_of({"data": 2, "stage": 2}, "stage", None) == [{"data": 2, "stage": 1}] * 2


def test_unknown_transports(monkeypatch):
    monkeypatch.setattr(ray, "init", None)  # a call would fail
    with pytest.raises(ValueError, match="transport must be one of auto, shared_memory"):
        cluster.launch({"stage": 2}, "stage", transport="pigeon")


def test_the_compiler_shards_within_a_group():
    submesh = abstract_submesh({"stage": 1, "fsdp": 2})
    assert dict(submesh.shape) == {"stage": 1, "fsdp": 2}
    assert submesh.axis_types == (jax.sharding.AxisType.Auto,) * 2
