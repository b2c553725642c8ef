"""What ``mpmd.jit`` has from ``jax.jit``, on Ray actors."""

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import assert_close


@pytest.mark.slow
def test_a_plan_for_shardings_that_shapes_carry_goes_on_to_actors(two_groups):
    """It is made without them."""

    step = make_step(mse, mpmd.Std1F1B(2), operation=mpmd.Mean)
    mesh = mpmd.AbstractMpmdMesh({"stage": 2, "fsdp": 2}, "stage")
    sharding = NamedSharding(mesh.abstract_submeshes[0], P("fsdp"))
    state, xs, ys = jax.eval_shape(lambda: (init(weights(2)), *batch()))
    sharded = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), state)
    lowered = mpmd.jit(step, mesh, donate_argnames="state").lower(sharded, xs, ys)
    loaded = lowered.compile(two_groups)
    new, results = loaded(init(weights(2)), *batch())
    assert {leaf.spec for leaf in jax.tree.leaves(new)} == {P("fsdp")}
    assert_close((new, results), jax.jit(step)(init(weights(2)), *batch()))
    check = mpmd.check(loaded, step, init(weights(2)), *batch(), steps=2)
    assert check.ok, str(check)
    again = mpmd.jit(step, two_groups).compile(new, xs, ys)
    assert {leaf.spec for leaf in jax.tree.leaves(again.argument_leaves(0))} == {("fsdp",)}
