"""Groups whose submeshes have different sizes compute what plain JAX computes."""

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import assert_parity, uneven_mesh_of

ADAM = optax.adam(1e-2, eps=1e-3)
ROWS = P(None, "data")
"""Of a batch (microbatches, rows, width): the rows."""

SHAPES = {
    "fewer rows": ({"data": 4, "model": 1}, {"data": 2, "model": 1}),
    "one device, then more": ({"data": 1, "model": 1}, {"data": 4, "model": 1}),
    "data, then data and model": ({"data": 4, "model": 1}, {"data": 2, "model": 2}),
    "model, then data": ({"data": 1, "model": 4}, {"data": 4, "model": 1}),
}


def like_parameters(state, spec):
    """The specs of parameters for every leaf of the state that has the shape of one."""
    return jax.tree.map(lambda leaf: spec if leaf.ndim == 2 else P(), state)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("spec", [P(), P("data", "model")], ids=["replicated", "sharded"])
def test_two_stages(shapes, spec):
    state = init(weights(2), ADAM)
    loaded = assert_parity(
        make_step(mse, mpmd.Std1F1B(2), ADAM),
        state,
        *batch(),
        mesh=uneven_mesh_of(*shapes),
        in_specs=(like_parameters(state, spec), ROWS, ROWS),
        donate_argnums=0,
    )
    assert loaded.plan.submeshes == tuple(tuple(shape.items()) for shape in shapes)
