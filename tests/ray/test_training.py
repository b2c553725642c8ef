"""Compiled steps on Ray actors compute what plain JAX computes."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import CLIPPED_ADAM, MICROBATCHES, batch, init, layer, make_step, mse, weights
from tests.support.parity import assert_close


def tied(params, x, y):
    h = mpmd.mark_stage_end(layer(params[0], x))
    h, tokens = mpmd.mark_stage_end((layer(params[1], h), jnp.int32(x[..., 0] > 0)))
    return jnp.mean((layer(params[0], h) - y) ** 2) + jnp.mean(tokens * 0.5)


def assert_parity(step, state, batch, mesh, **options):
    compiled = mpmd.jit(step, mpmd_mesh=mesh, **options)
    reference = jax.jit(step)
    expected, actual = state, jax.tree.map(jnp.copy, state)
    for _ in range(2):
        actual, result = compiled(actual, *batch)
        expected, expected_result = reference(expected, *batch)
        assert_close(result, expected_result)
    assert_close(actual, expected, 1e-4)
    return actual


@pytest.mark.usual("Interleaved1F1B(num_stages=8, mpmd_dim=4)")
@pytest.mark.parametrize(
    "schedule", [mpmd.GPipe(4), mpmd.Std1F1B(4), mpmd.Eager1F1B(4), mpmd.Interleaved1F1B(8, 4)], ids=str
)
def test_schedules_with_a_clipped_optimizer(four_groups, schedule):
    params = weights(schedule.num_stages)
    step = make_step(mse, schedule, CLIPPED_ADAM)
    assert_parity(step, init(params, CLIPPED_ADAM), batch(), four_groups)


def test_tied_weights_and_integers_across_stages(four_groups):
    step = make_step(tied, mpmd.Std1F1B(3))
    state = assert_parity(step, init(weights(2)), batch(), four_groups)
    assert state[0][0]["w"].mpmd_idxs == (0, 2)


@pytest.mark.slow
def test_bfloat16(four_groups):
    step = make_step(mse, mpmd.Std1F1B(3))
    compiled = mpmd.jit(step, mpmd_mesh=four_groups)
    state = init(weights(3, jnp.bfloat16))
    assert_close(compiled(state, *batch())[0], jax.jit(step)(state, *batch())[0], 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("typed", [True, False])
def test_random_keys_in_the_state(four_groups, typed):
    def step(state, xs, ys):
        params, key = state
        key, dropout = jax.random.split(key)

        def loss_fn(params, index):
            h, k = xs[index], jax.random.fold_in(dropout, index)
            for i, stage in enumerate(params):
                h = layer(stage, h) * jax.random.bernoulli(jax.random.fold_in(k, i), 0.5, h.shape)
                h, k = mpmd.mark_stage_end((h, k))
            return jnp.mean((h - ys[index]) ** 2)

        loss, grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss_fn)(params, i),
            MICROBATCHES,
            schedule=mpmd.Std1F1B(3),
            operation=mpmd.Add,
        )
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key), loss

    key = jax.random.key(1) if typed else jax.random.PRNGKey(1)
    assert_parity(step, (weights(3), key), batch(), four_groups)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["data", "weights"])
def test_submeshes_of_two_devices(two_groups, sharded):
    optimizer = optax.adam(1e-2)
    state = init(weights(2), optimizer)
    weight_spec = P("fsdp") if sharded == "weights" else P()
    state_specs = jax.tree.map(lambda leaf: weight_spec if leaf.ndim else P(), state)
    in_specs = (state_specs, P(None, "fsdp"), P(None, "fsdp"))
    step = make_step(mse, mpmd.Std1F1B(2), optimizer)
    state = assert_parity(step, state, batch(), two_groups, in_specs=in_specs, donate_argnums=0)
    assert state[0][0]["w"].spec == weight_spec


@pytest.mark.slow
def test_steps_are_queued_ahead_and_keep_their_order(four_groups):
    step = make_step(mse, mpmd.Std1F1B(4))
    state = init(weights(4))
    compiled = mpmd.jit(step, mpmd_mesh=four_groups, donate_argnums=0)
    reference = jax.jit(step)
    expected, losses, expected_losses = state, [], []
    state = jax.tree.map(jnp.copy, state)
    for _ in range(10):
        state, (loss, _) = compiled(state, *batch())
        losses.append(loss)
        expected, (loss, _) = reference(expected, *batch())
        expected_losses.append(loss)
    np.testing.assert_allclose([float(loss) for loss in losses], expected_losses, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:group . .* of the operations:mpmd.PerformanceWarning")
def test_a_failing_task_names_itself(four_groups):
    """Far more memory than there is: the task compiles, and fails when it runs."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def loss_fn(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        h = layer(params[1], h)
        big = jnp.broadcast_to(h[0, 0], (100 * pages // 4 // 2**20, 2**20)) * y[0, 0]
        # Without a gradient: that of a sort has more indices than every compiler of XLA takes.
        return jnp.mean((h - y) ** 2) + jax.lax.stop_gradient(jnp.sort(jnp.cumsum(big, 0), 1)[-1, -1])

    step = make_step(loss_fn, mpmd.Std1F1B(2))
    compiled = mpmd.jit(step, mpmd_mesh=four_groups)
    state = init(weights(2))
    _, (loss, _) = compiled(state, *batch())
    with pytest.raises(mpmd.TaskError, match="fwd_1__0 failed on group 1") as caught:
        float(loss)
    assert caught.value.mpmd_idx == 1
    good = make_step(mse, mpmd.Std1F1B(2))
    assert_parity(good, state, batch(), four_groups)
