"""Meshes that ``launch`` is asked for: what it refuses before it connects, and what groups get."""

import jax
import pytest
import ray

import cluster
from cluster.mesh import abstract_submesh


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


def test_unknown_transports(monkeypatch):
    monkeypatch.setattr(ray, "init", None)  # a call would fail
    with pytest.raises(ValueError, match="transport must be one of auto, shared_memory"):
        cluster.launch({"stage": 2}, "stage", transport="pigeon")


def test_the_compiler_shards_within_a_group():
    submesh = abstract_submesh({"stage": 4, "fsdp": 2}, "stage")
    assert dict(submesh.shape) == {"stage": 1, "fsdp": 2}
    assert submesh.axis_types == (jax.sharding.AxisType.Auto,) * 2
