"""Contexts of JAX's configuration that hold where a step is called hold where it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from tests.support.models import batch, layer, sgd_step, squares, weights
from tests.support.parity import assert_close


@jax.custom_vjp
def log_of_positive(h):
    return jnp.where(h > 0, jnp.log(h), 0.0)


# The forward keeps NaNs for the backward, which drops them.
log_of_positive.defvjp(
    lambda h: (log_of_positive(h), jnp.log(h)), lambda kept, g: (jnp.where(jnp.isnan(kept), 0.0, g * kept),)
)


def harmless(params, x, y):
    h = mpmd.mark_stage_end(log_of_positive(layer(params[0], x)))
    return squares(log_of_positive(layer(params[1], h)), y)


def forward_fault(params, x, y):
    h = mpmd.mark_stage_end(layer(params[0], x))
    bad = jnp.where(x[0, 0] == batch()[0][2, 0, 0], jnp.nan, 1.0)
    return squares(layer(params[1], h) * bad, y)


def overflow(params, x, y):
    h = mpmd.mark_stage_end(layer(params[0], x) + 2e38 + 2e38)
    return squares(layer(params[1], h), y)


def call(mesh, loss):
    return mpmd.jit(sgd_step(loss, mpmd.Std1F1B(2)), mesh), (weights(2), *batch())


@pytest.mark.usual("True")
@pytest.mark.parametrize("globally", [False, True])
def test_nans_name_task_group_and_value(mesh, globally):
    step, args = call(mesh, forward_fault)
    assert np.isnan(float(step(*args)[1]))  # nobody asked
    if globally:
        jax.config.update("jax_debug_nans", True)
    try:
        with jax.debug_nans(True):
            total = step(*args)[1]
    finally:
        jax.config.update("jax_debug_nans", False)
    with pytest.raises(
        mpmd.errors.NonFiniteError, match=r"^fwd_1__2.* on group 1 made a value with nan: "
    ) as caught:
        float(total)
    assert isinstance(caught.value, FloatingPointError | mpmd.TaskError)
    assert (caught.value.mpmd_idx, caught.value.label.split("__")[1][0]) == (1, "2")
    assert np.isnan(float(step(*args)[1]))


def test_infinities_are_errors_of_their_own(mesh):
    step, args = call(mesh, overflow)
    said = r"fwd_0__0 on group 0 made a value with inf: fwd_0__0\.\d: float32\[.*\], sent to group 1"
    with jax.debug_infs(True), pytest.raises(mpmd.TaskError, match=said):
        float(step(*args)[1])


def test_what_jit_does_not_report_is_not_reported(mesh):
    step, args = call(mesh, harmless)
    expected = jax.jit(sgd_step(harmless, mpmd.Std1F1B(2)))
    with jax.debug_nans(True), jax.debug_infs(True):
        assert_close(jax.block_until_ready(step(*args)), expected(*args))


def step_with_noise(traced):
    """A step that draws random numbers: which ones is decided where it is lowered."""

    def loss(params, x, y):
        traced.append(jax.config.jax_default_matmul_precision)
        h = mpmd.mark_stage_end(layer(params[0], x))
        noise = jax.random.normal(jax.random.PRNGKey(0), h.shape)
        return squares(layer(params[1], h) + noise, y)

    return sgd_step(loss, mpmd.Std1F1B(2))


CONTEXTS = {
    "partitionable keys": lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
    "kind of keys": lambda: jax.default_prng_impl("rbg"),
    "precision": lambda: jax.default_matmul_precision("bfloat16"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "x64": lambda: jax.enable_x64(True),
}


@pytest.mark.usual("x64")
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_a_step_is_compiled_for_each_context(mesh, context):
    traced = []
    fun = step_with_noise(traced)
    step = mpmd.jit(fun, mesh)
    args = weights(2), *batch()
    outside = step(*args)[1]
    counts = [len(traced)]
    with context():
        inside = step(*args)[1]
        counts.append(len(traced))
        assert_close(inside, jax.jit(lambda *args: fun(*args))(*args)[1])
    del traced[counts[-1] :]
    assert counts[1] > counts[0]
    assert_close(step(*args)[1], outside)
    with context():
        assert_close(step(*args)[1], inside)
    assert len(traced) == counts[1]


def test_meshes_and_devices_of_the_caller_compile_nothing(mesh):
    traced = []
    step = mpmd.jit(step_with_noise(traced), mesh)
    args = weights(2), *batch()
    outside = step(*args)[1]
    count = len(traced)
    ambient = jax.make_mesh((2,), ("other",))
    with jax.set_mesh(ambient):
        assert_close(step(*args)[1], outside)
    with jax.default_device(jax.devices()[1]), jax.debug_nans(True):
        assert_close(step(*args)[1], outside)
    assert len(traced) == count
