"""Functions without a loop, and state made where it lives, on Ray actors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import SGD, batch, init, make_step, mse
from tests.support.parity import assert_close, assert_replicas_equal, raw


def make_state(key):
    keys = jax.random.split(key, 2)
    params = [{"w": jax.random.normal(k, (4, 4)), "b": jax.random.uniform(k, (4,))} for k in keys]
    return init(params, SGD)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["two_groups", "two_process_groups"])
def test_state_is_made_and_averaged_on_the_groups(mesh, request, monkeypatch):
    mesh = request.getfixturevalue(mesh)
    state = jax.eval_shape(make_state, jax.random.key(0))
    specs = jax.tree.map(lambda leaf: P(None, "fsdp") if len(leaf.shape) == 2 else P(), state)
    step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh, in_specs=(specs, P(), P()), donate_argnums=0)
    step = step.compile(state, *batch())
    state = step.init(make_state, jax.random.key(3))
    for leaf, read in zip(jax.tree.leaves(state), jax.tree.leaves(step.argument_leaves()), strict=True):
        assert (leaf.mpmd_idxs, leaf.placement.spec) == (read.mpmd_idxs, read.spec)
    expected = jax.jit(make_state)(jax.random.key(3))
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert raw(leaf).tobytes() == raw(wanted).tobytes()

    def average(average, params):
        return jax.tree.map(lambda a, b: a / 2 + b / 2, average, params)

    with monkeypatch.context() as patched:
        patched.setattr(mpmd.MpmdArray, "raw_value", None)
        averaged = mpmd.jit(average, mesh)(state[0], state[0])
        product = mpmd.jit(lambda params: params[0]["w"] @ params[1]["w"], mesh)(state[0])
    assert [leaf.placement for leaf in jax.tree.leaves(averaged)] == [
        leaf.placement for leaf in jax.tree.leaves(state[0])
    ]
    assert_close(averaged, expected[0])
    assert_close(product, expected[0][0]["w"] @ expected[0][1]["w"])
    _, (loss, _) = step(state, *batch())
    assert np.isfinite(float(loss))


@pytest.mark.slow
def test_replicas_and_keys(four_groups):
    def make(key):
        return {"bias": jax.random.normal(key, (3,)), "key": jax.random.fold_in(key, 1)}

    def step(state, xs):
        def loss(x):
            for _ in range(3):
                x = mpmd.mark_stage_end(jnp.tanh(x + state["bias"]))
            return jnp.sum(x + state["bias"])

        return state, mpmd.treduce(loss, xs, mpmd.ForwardOnly(4, 4), operation=mpmd.Add)

    xs = np.ones((2, 3), np.float32)
    compiled = mpmd.jit(step, four_groups).compile(jax.eval_shape(make, jax.random.key(0)), xs)
    state = compiled.init(make, jax.random.key(0))
    assert state["bias"].mpmd_idxs == (0, 1, 2, 3)
    assert_replicas_equal(state)
    assert_close(state, jax.jit(make)(jax.random.key(0)))
    draw = mpmd.jit(lambda state: jax.random.uniform(state["key"], (2,)), four_groups)
    assert_close(draw(state), jax.random.uniform(make(jax.random.key(0))["key"], (2,)))
