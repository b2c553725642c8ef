"""Functions that name meshes of their own run on whichever group has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import ROW_SPECS, batch, layer, mse, sgd_step, weights
from tests.support.parity import assert_like_jit


def devices(count, *axes):
    return Mesh(np.array(jax.devices()[:count]).reshape([1] * (len(axes) - 1) + [count]), axes)


def groups(count):
    grid = np.array(jax.devices()[: 2 * count]).reshape(2, count)
    return mpmd.MpmdMesh(Mesh(grid, ("stage", "data")), "stage")


def step_with(activation):
    def loss(params, x, y):
        return mse(params, x, y, lambda p, h: activation(layer(p, h)))

    return sgd_step(loss, mpmd.Std1F1B(2))


def centred(mesh, axis):
    return jax.shard_map(
        lambda h: h - jax.lax.pmean(jnp.mean(h, 0, keepdims=True), axis),
        mesh=mesh,
        in_specs=P(axis),
        out_specs=P(axis),
    )


@pytest.mark.usual("of a group")
@pytest.mark.parametrize(
    "own",
    [lambda: devices(2, "data"), lambda: devices(4, "stage", "data")],
    ids=["of a group", "of all groups"],
)
def test_a_sharding_may_name_a_mesh(own):
    sharding = NamedSharding(own(), P("data"))
    step = step_with(lambda h: jax.lax.with_sharding_constraint(h, sharding))
    with groups(2) as mesh:
        assert_like_jit(mesh, step, weights(2), *batch(), in_specs=ROW_SPECS)


def test_a_mesh_of_another_size_is_an_error_that_names_the_line():
    step = step_with(centred(devices(2, "data"), "data"))
    with groups(1) as mesh, pytest.raises(mpmd.CompileError) as caught:
        mpmd.jit(step, mesh)(weights(2), *batch())
    assert "shard_map at" in str(caught.value) and "test_abstract_meshes.py" in str(caught.value)
    assert "is over the mesh {'data': 2}, but a group's is {'stage': 1, 'data': 1}" in str(caught.value)
