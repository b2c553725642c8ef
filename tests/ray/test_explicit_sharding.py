"""Explicit mesh axes on Ray actors, whose own meshes need not know of them."""

import pytest
from jax.sharding import AxisType

import cluster
from tests.support import decoder


@pytest.mark.slow
def test_a_decoder_over_two_axes_trains_as_under_jit(local_ray):
    axes = {"stage": 2, "fsdp": 2, "tensor": 2}
    with cluster.launch(axes, "stage", axis_types=AxisType.Explicit, cpus_per_group=0.25) as mesh:
        decoder.assert_trains_as_under_jit(mesh)
