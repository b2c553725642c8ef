"""Explicit mesh axes on Ray actors, whose own meshes need not know of them."""

import pytest
from jax.sharding import AxisType

import cluster
from tests.support.explicit import assert_two_axes


@pytest.mark.slow
def test_two_axes(local_ray):
    axes = {"stage": 2, "fsdp": 2, "tensor": 2}
    with cluster.launch(axes, "stage", axis_types=AxisType.Explicit, cpus_per_group=0.25) as mesh:
        assert_two_axes(mesh)
