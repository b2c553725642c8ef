"""Explicit mesh axes on Ray actors, whose own meshes need not know of them."""

import copy

import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support.explicit import BLOCKS, assert_as_on_one_group, make_step


@pytest.mark.parametrize("groups", ["two_groups", "two_process_groups"])
@pytest.mark.parametrize("block", ["residual", "experts", "layers"])
def test_blocks_of_public_codes_train_as_under_jit(groups, block, request):
    mesh = copy.copy(request.getfixturevalue(groups))  # to be closed by the fixture
    mesh.axis_types = {"stage": AxisType.Explicit, "fsdp": AxisType.Explicit}
    _, (params, _), _ = assert_as_on_one_group(mesh, make_step(BLOCKS[block]))
    assert params["layers"][0]["w"].spec == P("fsdp")
    assert params["layers"][0]["w"].sharding.mesh.axis_types == (AxisType.Explicit,) * 2
