"""Explicit mesh axes on Ray actors, whose own meshes need not know of them."""

import pytest
from jax.sharding import AxisType

from tests.ray.conftest import launch
from tests.support.explicit import assert_two_axes


@pytest.mark.slow
def test_two_axes(local_ray):
    axes = {"stage": 2, "fsdp": 2, "tensor": 2}
    with launch(axes, axis_types=AxisType.Explicit) as mesh:
        assert_two_axes(mesh)
