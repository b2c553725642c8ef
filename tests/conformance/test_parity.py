"""Circumstances of a call: contexts of JAX, threads, dtypes, memory that its owner reuses."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import ROW_SPECS, batch, mse, sgd_step, shrink, weights
from tests.support.parity import assert_close, assert_like_jit, assert_parity, mesh_of

CONTEXTS = {
    "checks for leaks": jax.checking_leaks,
    "jit disabled": jax.disable_jit,
}


@pytest.mark.usual("jit disabled")
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_contexts_of_jax(mesh, context):
    arguments = (weights(2), *batch(2))
    with context():
        assert_like_jit(mesh, sgd_step(mse, mpmd.Std1F1B(2)), *arguments)


def test_numpy_arguments_are_read_during_the_call(mesh):
    state = weights(2)
    xs, ys = map(np.array, batch())
    expected = jax.jit(shrink)(state, xs, ys)
    compiled = mpmd.jit(shrink, mesh).compile(state, xs, ys)
    actual = compiled(state, xs, ys)
    xs[:] = 0
    assert_close(actual, expected)


def test_a_typed_key_from_outside(mesh):
    key = jax.random.key(3)

    def loss(params, x, y):
        return mse(params, x + jax.random.normal(key, x.shape), y)

    assert_like_jit(mesh, sgd_step(loss, mpmd.Std1F1B(2)), weights(2), *batch())


def test_what_the_compiler_shards_shows_it():
    def step(params, xs, ys):
        params, _ = sgd_step(mse, mpmd.Std1F1B(2))(params, xs, ys)
        return params, jnp.cumsum(xs, -1)

    with mesh_of(2, data=2) as mesh:
        _, sums = mpmd.jit(step, mesh, in_specs=ROW_SPECS)(weights(2), *batch())
        assert sums.spec == sums.to_mpmd_local_array.sharding.spec


def test_steps_from_several_threads():
    state = weights(3)
    expected = jax.jit(shrink)(state, *batch())
    with mesh_of(3) as mesh, concurrent.futures.ThreadPoolExecutor(4) as threads:
        compiled = mpmd.jit(shrink, mesh).compile(state, *batch())
        for actual in threads.map(lambda _: compiled(state, *batch()), range(12)):
            assert_close(actual, expected)


def test_calls_within_the_context_of_the_whole_mesh():
    def loss(params, x, y):
        return mse(params, jax.lax.with_sharding_constraint(x, P("data")), y)

    state = weights(2)
    expected = jax.jit(sgd_step(mse, mpmd.Std1F1B(2)))(state, *batch())
    with mesh_of(2, data=2) as mesh, jax.set_mesh(mesh.jax_mesh):
        compiled = mpmd.jit(sgd_step(loss, mpmd.Std1F1B(2)), mesh, in_specs=ROW_SPECS, out_specs=P())
        assert_close(compiled(state, *batch()), expected)


def test_a_step_of_64_bits_is_called_outside_of_its_context():
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), weights(2))
        arguments = [params, *(jnp.asarray(leaf, jnp.float64) for leaf in batch())]
        expected = jax.jit(shrink)(*arguments)
        mesh = mesh_of(2)
        loaded = mpmd.jit(shrink, mesh).compile(*arguments)
    with mesh:
        assert_close(loaded(*arguments), expected)


def test_groups_along_any_axis_of_the_mesh():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("data", "stage")), "stage")
    step = sgd_step(mse, mpmd.Std1F1B(2))
    assert_parity(step, weights(2), *batch(), mesh=mesh, in_specs=ROW_SPECS)


def with_zeros(w, loss, grads):
    return jnp.where(jnp.isfinite(loss).all(), grads.astype(jnp.bfloat16), jnp.zeros_like(w))


def with_result_type(w, loss, grads):
    return grads.astype(jnp.result_type(w, jnp.bfloat16))


def with_a_number_of_a_type(w, loss, grads):
    return grads + float(jnp.finfo(jnp.result_type(w, jnp.bfloat16)).eps)


@pytest.mark.parametrize("result", [with_zeros, with_result_type, with_a_number_of_a_type])
def test_a_weak_type_that_no_equation_reads_decides_dtypes_of_the_next_step_as_under_jit(mesh, result):
    def step(w, xs):
        def loss(w, x):
            return jnp.sum(mpmd.mark_stage_end(x * w) * w)

        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(w, x), xs, schedule=mpmd.Std1F1B(2))
        return w - jnp.float32(0.1) * grads, result(w, value, grads)

    xs = jnp.ones((4, 3), jnp.float32)
    compiled, plain = mpmd.jit(step, mesh), jax.jit(step)
    w = expected = jnp.full(3, 0.1)
    for _ in range(2):
        w, actual = compiled(w, xs)
        expected, of_plain = plain(expected, xs)
        assert actual.dtype == of_plain.dtype
        assert_close(actual, of_plain)
