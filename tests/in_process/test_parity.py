"""Programs a user would write, each compared with plain JAX over two steps with the state fed back."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import (
    BATCH,
    SGD,
    WIDTH,
    batch,
    init,
    keys,
    layer,
    make_step,
    mlp,
    mse,
    weights,
)
from tests.support.parity import assert_close, assert_parity, mesh_of

SCHEDULES = {
    "GPipe": lambda stages, groups: mpmd.GPipe(stages),
    "Std1F1B": lambda stages, groups: mpmd.Std1F1B(stages),
    "Eager1F1B": lambda stages, groups: mpmd.Eager1F1B(stages),
    "Interleaved1F1B": lambda stages, groups: mpmd.Interleaved1F1B(stages, groups),
}


@pytest.mark.parametrize("microbatches", [1, 2, 4, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_mlp_under_every_schedule(name, microbatches):
    step = make_step(mse, SCHEDULES[name](4, 4))
    assert_parity(step, init(weights(4)), *batch(microbatches), mesh=mesh_of(4))


@pytest.mark.parametrize(("stages", "groups"), [(8, 4), (6, 2), (1, 1), (3, 4)])
@pytest.mark.parametrize("microbatches", [1, 3, 6])
def test_stages_and_groups(stages, groups, microbatches):
    step = make_step(mse, mpmd.Interleaved1F1B(stages, min(stages, groups)))
    assert_parity(step, init(weights(stages)), *batch(microbatches), mesh=mesh_of(groups))


def test_a_mark_after_the_last_stage_is_allowed():
    def loss(params, x, y):
        h = x
        for stage in params:
            h = mpmd.mark_stage_end(layer(stage, h))
        return jnp.mean((h - y) ** 2)

    assert_parity(make_step(loss, mpmd.Std1F1B(3)), init(weights(3)), *batch(), mesh=mesh_of(3))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
        optax.lamb(1e-2),
        optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1, momentum=0.9)),
        optax.adafactor(1e-2),
        optax.MultiSteps(optax.adam(1e-2), 2),
        optax.apply_if_finite(optax.adam(1e-2), 3),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    ],
    ids=["clip", "warmup", "lamb", "agc", "adafactor", "multisteps", "finite", "inject"],
)
def test_optimizers(optimizer):
    step = make_step(mse, mpmd.Std1F1B(4), optimizer)
    loaded = assert_parity(step, init(weights(4), optimizer), *batch(), mesh=mesh_of(4), tolerance=1e-4)
    held = [group.parameter_bytes for group in loaded.report().groups]
    assert max(held) - min(held) <= 64, "each group holds the optimizer's state of its own weights"


@pytest.mark.parametrize("optimizer", [SGD, optax.adamw(1e-2)], ids=["sgd", "adamw"])
def test_tied_embeddings(optimizer):
    def loss(params, x, y):
        table, stages = params
        h = mpmd.mark_stage_end(jnp.take(table, jnp.int32(x[..., 0] > 0), axis=0))
        h = mpmd.mark_stage_end(layer(stages[0], h))
        logits = layer(stages[1], h) @ table.T
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    params = (jax.random.normal(keys(1)[0], (5, WIDTH)), weights(2))
    step = make_step(loss, mpmd.Std1F1B(3), optimizer)
    loaded = assert_parity(step, init(params, optimizer), *batch(), mesh=mesh_of(3), tolerance=1e-4)
    table = loaded.plan.inputs[0]
    assert table.mpmd_idxs == (0, 2)


def test_a_weight_shared_by_all_stages():
    def loss(params, x, y):
        h = x
        for _ in range(3):
            h = mpmd.mark_stage_end(layer(params[0], h))
        return jnp.mean((h - y) ** 2)

    assert_parity(make_step(loss, mpmd.Std1F1B(3)), init(weights(1)), *batch(), mesh=mesh_of(3))


def test_two_equal_weights_shared_by_two_stages():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], layer(params[1], x)))
        return jnp.mean((layer(params[1], layer(params[0], h)) - y) ** 2)

    assert_parity(make_step(loss, mpmd.Std1F1B(2)), init(weights(2)), *batch(), mesh=mesh_of(2))


def test_skip_connections_before_and_after_the_mark():
    def loss(params, x, y):
        a = layer(params[0], x)
        h = mpmd.mark_stage_end(a)
        b = layer(params[1], h)
        h = mpmd.mark_stage_end(b)
        h = mpmd.mark_stage_end(layer(params[2], h + a))
        return jnp.mean((layer(params[3], h + b + a) - y) ** 2)

    assert_parity(make_step(loss, mpmd.Std1F1B(4)), init(weights(4)), *batch(), mesh=mesh_of(4))


def test_auxiliary_losses_and_l2_of_all_weights():
    def loss(params, x, y):
        h, auxiliary = x, 0.0
        for i, stage in enumerate(params):
            h = layer(stage, h)
            auxiliary += jnp.mean(h**2) * 0.1
            if i < len(params) - 1:
                h = mpmd.mark_stage_end(h)
        l2 = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
        return jnp.mean((h - y) ** 2) + auxiliary + 0.01 * l2

    loaded = assert_parity(make_step(loss, mpmd.Std1F1B(4)), init(weights(4)), *batch(), mesh=mesh_of(4))
    assert all(len(leaf.mpmd_idxs) == 1 for leaf in loaded.plan.inputs if "[0][0]" in leaf.path)


def test_has_aux_with_an_operation_for_each_part():
    def loss(params, x, y):
        h = mlp(params, x)
        return jnp.mean((h - y) ** 2), {"max": jnp.int32(jnp.max(h) * 100), "last": h[0], "all": h}

    class Last:
        def state(self, n, a):
            return jnp.zeros(a.shape, a.dtype)

        def update(self, state, update, index):
            return update

    operation = ((mpmd.Add, {"max": mpmd.Max, "last": Last(), "all": mpmd.Concat(axis=1)}), mpmd.Add)

    def step(state, xs, ys):
        (loss_sum, aux), grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss, has_aux=True)(state, *mb),
            (xs, ys),
            schedule=mpmd.Std1F1B(3),
            operation=operation,
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), (loss_sum, aux)

    assert_parity(step, weights(3), *batch(), mesh=mesh_of(3))


def test_gradients_divided_by_a_token_count():
    def step(state, xs, ys):
        def loss(params, x, y):
            mask = y[..., 0] > 0
            per_token = jnp.mean((mlp(params, x) - y) ** 2, -1)
            return jnp.sum(per_token * mask), jnp.sum(mask)

        (total, count), grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss, has_aux=True)(state, *mb),
            (xs, ys),
            schedule=mpmd.Std1F1B(3),
            operation=mpmd.Add,
        )
        state = jax.tree.map(lambda p, g: p - 0.1 * g / count, state, grads)
        return state, total / count

    assert_parity(step, weights(3), *batch(), mesh=mesh_of(3))


def test_outputs_that_are_literals_constants_duplicates_and_arguments():
    constant = jnp.arange(3.0)

    def step(state, xs, ys):
        params, extra, unused = state
        loss, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(mse)(params, *mb),
            (xs, ys),
            schedule=mpmd.Std1F1B(2),
            operation=mpmd.Add,
        )
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return (params, extra, unused + 1), (loss, loss, 1.5, constant, extra, xs, params[0]["w"])

    state = (weights(2), jnp.arange(6.0), jnp.int32(0))
    assert_parity(step, state, *batch(), mesh=mesh_of(2))


def test_unused_parameter_is_still_decayed():
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    step = make_step(lambda p, x, y: mse(p[:2], x, y), mpmd.Std1F1B(2), optimizer)
    assert_parity(step, init(weights(3), optimizer), *batch(), mesh=mesh_of(2), tolerance=1e-4)


def test_frozen_prefix_and_stop_gradient():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(jax.lax.stop_gradient(params[0]), x))
        h = mpmd.mark_stage_end(jax.lax.stop_gradient(layer(params[1], h)))
        return jnp.mean((layer(params[2], h) - y) ** 2)

    loaded = assert_parity(make_step(loss, mpmd.Std1F1B(3)), init(weights(3)), *batch(), mesh=mesh_of(3))
    assert [leaf.mpmd_idxs for leaf in loaded.plan.inputs[:6]] == [(0,), (0,), (1,), (1,), (2,), (2,)]


def test_a_stage_without_parameters():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(jnp.sin(x))
        h = mpmd.mark_stage_end(layer(params[0], h))
        h = mpmd.mark_stage_end(jnp.cos(h))
        return jnp.mean((layer(params[1], h) - y) ** 2)

    assert_parity(make_step(loss, mpmd.Std1F1B(4)), init(weights(2)), *batch(), mesh=mesh_of(4))


@pytest.mark.parametrize("typed", [True, False])
def test_dropout_with_the_key_in_the_anchor(typed):
    def step(state, xs, ys):
        params, key = state
        key, sub = jax.random.split(key)

        def loss(params, i):
            x, y = xs[i], ys[i]
            k = jax.random.fold_in(sub, i)
            h = x
            for stage in params:
                k, mine = jax.random.split(k)
                h = layer(stage, h) * jax.random.bernoulli(mine, 0.5, h.shape)
                h, k = mpmd.mark_stage_end((h, k))
            return jnp.mean((h - y) ** 2)

        loss_sum, grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss)(params, i),
            len(xs),
            schedule=mpmd.Std1F1B(3),
            operation=mpmd.Add,
        )
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key), loss_sum

    key = jax.random.key(1) if typed else jax.random.PRNGKey(1)
    assert_parity(step, (weights(3), key), *batch(), mesh=mesh_of(3))


def test_masks_and_positions_are_not_sent():
    def loss(params, x, y):
        mask = jnp.tril(jnp.ones((BATCH, BATCH))) > 0
        positions = jnp.arange(WIDTH) / WIDTH
        h = x
        for i, stage in enumerate(params):
            h = jnp.where(mask, 1.0, 0.0) @ layer(stage, h + positions)
            if i < len(params) - 1:
                h = mpmd.mark_stage_end(h)
        return jnp.mean((h - y) ** 2)

    loaded = assert_parity(make_step(loss, mpmd.Std1F1B(3)), init(weights(3)), *batch(), mesh=mesh_of(3))
    activation = BATCH * WIDTH * 4
    sent = loaded.report().groups
    assert [g.sent_bytes for g in sent] == [4 * activation, 2 * 4 * activation, 4 * activation]


def test_marks_inside_jit_and_one_function_for_all_stages():
    @jax.jit
    def stage(params, h):
        return mpmd.mark_stage_end(layer(params, h))

    def loss(params, x, y):
        h = x
        for i in range(4):
            h = stage(params[i], h)
        return jnp.mean((h - y) ** 2)

    assert_parity(make_step(loss, mpmd.Std1F1B(4)), init(weights(4)), *batch(), mesh=mesh_of(4))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_checkpoint_within_stages(policy):
    def loss(params, x, y):
        h = x
        for stage in params:
            h = mpmd.mark_stage_end(jax.checkpoint(layer, policy=policy)(stage, h))
        return jnp.mean((h - y) ** 2)

    assert_parity(make_step(loss, mpmd.Std1F1B(3)), init(weights(3)), *batch(), mesh=mesh_of(3))


def test_scan_over_layers_within_stages():
    def loss(params, x, y):
        h = x
        for stage in params:
            h = mpmd.mark_stage_end(jax.lax.scan(lambda h, p: (layer(p, h), None), h, stage)[0])
        return jnp.mean((h - y) ** 2)

    stacked = [jax.tree.map(lambda *a: jnp.stack(a), *weights(3)) for _ in range(3)]
    assert_parity(make_step(loss, mpmd.Std1F1B(3)), init(stacked), *batch(), mesh=mesh_of(3))


def test_forward_only():
    def step(params, xs, ys):
        losses = mpmd.treduce(
            lambda mb: mse(params, *mb), (xs, ys), schedule=mpmd.Std1F1B(3), operation=mpmd.Concat()
        )
        return params, losses

    assert_parity(step, weights(3), *batch(), mesh=mesh_of(3))


def test_identical_stages_are_one_executable():
    step = make_step(mse, mpmd.Std1F1B(4))
    loaded = assert_parity(step, init(weights(4)), *batch(), mesh=mesh_of(4))
    names = {e.name for e in loaded.plan.executables}
    assert "fwd_2" not in names and len(names & {"bwd_1", "bwd_2"}) == 1


def test_donated_state():
    step = make_step(mse, mpmd.Std1F1B(3), optax.adam(1e-2))
    params, opt_state = init(weights(3), optax.adam(1e-2))
    xs, ys = batch()
    expected = jax.jit(step)(jax.jit(step)((params, opt_state), xs, ys)[0], xs, ys)
    with mesh_of(3) as mesh:
        compiled = mpmd.mpmd_jit_with_loop(step, mpmd_mesh=mesh, donate_argnums=0)
        state = jax.tree.map(jnp.copy, (params, opt_state))
        first, _ = compiled(state, xs, ys)
        assert state[0][0]["w"].is_deleted()
        second, rest = compiled(first, xs, ys)
        assert first[0][0]["w"].is_deleted()
        assert_close((second, rest), expected)
        with pytest.raises(ValueError, match="donated to an earlier call"):
            compiled(first, xs, ys)


def test_numpy_arguments_are_read_during_the_call():
    step = make_step(mse, mpmd.Std1F1B(2))
    state = init(weights(2))
    xs, ys = map(np.array, batch())
    expected = jax.jit(step)(state, xs, ys)
    with mesh_of(2) as mesh:
        compiled = mpmd.mpmd_jit_with_loop(step, mpmd_mesh=mesh).compile(state, xs, ys)
        actual = compiled(state, xs, ys)
        xs[:] = 0
        assert_close(actual, expected)


def test_weak_types_decide_as_under_jit_where_dtypes_mix():
    def loss(params, x, y, scale):
        h = mpmd.mark_stage_end(layer(params[0], x) * scale)
        return jnp.mean((layer(params[1], h) * scale - y) ** 2)

    def step(params, xs, ys, scale):
        total, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss)(params, *mb, scale),
            (xs, ys),
            schedule=mpmd.Std1F1B(2),
            operation=mpmd.Add,
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), total

    arguments = [jnp.bfloat16(leaf) for leaf in batch()]
    params = weights(2, jnp.bfloat16)
    with mesh_of(2) as mesh:
        actual = mpmd.mpmd_jit_with_loop(step, mpmd_mesh=mesh)(params, *arguments, 1.1)
        assert_close(actual, jax.jit(step)(params, *arguments, 1.1), 2e-2)
        assert actual[1].dtype == jnp.bfloat16


def test_a_typed_key_from_outside_and_static_arguments_by_name():
    key = jax.random.key(3)

    def step(state, xs, ys, power):
        def loss(params, x, y):
            noise = jax.random.normal(key, x.shape)
            return jnp.mean((mlp(params, x + noise) - y) ** power)

        return make_step(loss, mpmd.Std1F1B(2))(state, xs, ys)

    state = init(weights(2))
    expected = jax.jit(step, static_argnames="power")(state, *batch(), 2)
    with mesh_of(2) as mesh:
        compiled = mpmd.mpmd_jit_with_loop(step, mpmd_mesh=mesh, static_argnames="power")
        assert_close(compiled(state, *batch(), 2), expected)
        assert_close(compiled(state, *batch(), power=2), expected)


def test_negative_axes_of_concat():
    def step(params, xs, ys):
        stacked = mpmd.treduce(
            lambda mb: mlp(params, mb[0]), (xs, ys), schedule=mpmd.GPipe(2), operation=mpmd.Concat(axis=-1)
        )
        return params, stacked

    assert_parity(step, weights(2), *batch(), mesh=mesh_of(2))
    assert jax.eval_shape(step, weights(2), *batch())[1].shape == (BATCH, WIDTH, len(batch()[0]))


def test_what_the_compiler_shards_shows_it():
    def step(params, xs, ys):
        grads = mpmd.treduce(
            lambda mb: jax.grad(mse)(params, *mb), (xs, ys), mpmd.Std1F1B(2), operation=mpmd.Add
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), jnp.cumsum(xs, -1)

    specs = (P(), P(None, "data"), P(None, "data"))
    with mesh_of(2, data=2) as mesh:
        _, sums = mpmd.mpmd_jit_with_loop(step, mpmd_mesh=mesh, in_specs=specs)(weights(2), *batch())
        assert sums.spec == sums.to_mpmd_local_array.sharding.spec


def test_steps_from_several_threads():
    step = make_step(mse, mpmd.Std1F1B(3))
    state = init(weights(3))
    expected = jax.jit(step)(state, *batch())
    with mesh_of(3) as mesh, concurrent.futures.ThreadPoolExecutor(4) as threads:
        compiled = mpmd.mpmd_jit_with_loop(step, mpmd_mesh=mesh).compile(state, *batch())
        for actual in threads.map(lambda _: compiled(state, *batch()), range(40)):
            assert_close(actual, expected)


def test_shard_map_within_a_stage():
    mesh = mesh_of(2, data=2)
    batch_spec = P("data")

    def make_loss(layer):
        def loss(params, x, y):
            h = mpmd.mark_stage_end(layer(params[0], x))
            return jnp.mean((layer(params[1], h) - y) ** 2)

        return loss

    sharded = jax.shard_map(
        layer, mesh=mesh.abstract_submesh, in_specs=(P(), batch_spec), out_specs=batch_spec
    )
    state = init(weights(2))
    expected = jax.jit(make_step(make_loss(layer), mpmd.Std1F1B(2)))(state, *batch())
    specs = (P(), P(None, "data"), P(None, "data"))
    with mesh:
        step = make_step(make_loss(sharded), mpmd.Std1F1B(2))
        assert_close(mpmd.mpmd_jit_with_loop(step, mpmd_mesh=mesh, in_specs=specs)(state, *batch()), expected)


def test_calls_within_the_context_of_the_whole_mesh():
    def loss(params, x, y):
        return mse(params, jax.lax.with_sharding_constraint(x, P("data")), y)

    state = init(weights(2))
    expected = jax.jit(make_step(mse, mpmd.Std1F1B(2)))(state, *batch())
    with mesh_of(2, data=2) as mesh, jax.set_mesh(mesh.jax_mesh):
        specs = (P(), P(None, "data"), P(None, "data"))
        compiled = mpmd.mpmd_jit_with_loop(
            make_step(loss, mpmd.Std1F1B(2)), mpmd_mesh=mesh, in_specs=specs, out_specs=P()
        )
        assert_close(compiled(state, *batch()), expected)


def test_64_bit_arithmetic_within_a_context():
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), weights(2))
        arguments = [jnp.asarray(leaf, jnp.float64) for leaf in batch()]
        loaded = assert_parity(make_step(mse, mpmd.Std1F1B(2)), init(params), *arguments, mesh=mesh_of(2))
    assert loaded.plan.inputs[0].aval.dtype == "float64"


@pytest.mark.parametrize("axes", [{"data": 2}, {"fsdp": 2}])
def test_submeshes_of_several_devices(axes):
    (axis,) = axes
    batch_spec = P(None, axis)
    state_spec = P(axis) if axis == "fsdp" else P()
    optimizer = optax.adam(1e-2)
    state = init(weights(3), optimizer)
    specs = jax.tree.map(lambda leaf: state_spec if leaf.ndim else P(), state)
    step = make_step(mse, mpmd.Std1F1B(3), optimizer)
    loaded = assert_parity(
        step,
        state,
        *batch(),
        mesh=mesh_of(3, **axes),
        in_specs=(specs, batch_spec, batch_spec),
        tolerance=1e-4,
    )
    assert loaded.plan.inputs[0].spec == ((axis,) if axis == "fsdp" else ())
