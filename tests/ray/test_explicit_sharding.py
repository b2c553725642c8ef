"""Explicit mesh axes on Ray actors, whose own meshes need not know of them."""

import copy

import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import cluster
from tests.support import decoder
from tests.support.explicit import BLOCKS, assert_as_on_one_group, make_step


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["two_groups", "two_process_groups"])
@pytest.mark.parametrize("block", ["residual", "experts", "layers"])
def test_blocks_of_public_codes_train_as_under_jit(groups, block, request):
    mesh = copy.copy(request.getfixturevalue(groups))  # to be closed by the fixture
    mesh.axis_types = {"stage": AxisType.Explicit, "fsdp": AxisType.Explicit}
    _, (params, _), _ = assert_as_on_one_group(mesh, make_step(BLOCKS[block]))
    assert params["layers"][0]["w"].spec == P("fsdp")
    assert params["layers"][0]["w"].submesh.axis_types == (AxisType.Explicit,) * 2


@pytest.mark.slow
def test_a_decoder_over_two_axes_trains_as_under_jit(local_ray):
    axes = {"stage": 2, "fsdp": 2, "tensor": 2}
    with cluster.launch(axes, "stage", axis_types=AxisType.Explicit, cpus_per_group=0.25) as mesh:
        decoder.assert_trains_as_under_jit(mesh)
