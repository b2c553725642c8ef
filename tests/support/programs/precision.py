"""Dtypes: half precision, master copies, integers, numbers of Python."""

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
from tests.support.models import WIDTH, batch, descend, keys, layer, mse, squares, weights
from tests.support.programs.table import Case, loop, program, trains

FEW_BITS = """int2 uint2 int4 uint4 float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn
float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu""".split()


@program(FEW_BITS)
def arrays_of_few_bits(dtype):
    """Fed back, returned as they are, and handed over by a mark that ``jax.checkpoint`` keeps."""
    signs = jnp.array(np.random.default_rng(0).integers(0, 2, (WIDTH, WIDTH)))

    def step(state, xs, ys):
        params, codes, other = state

        @jax.checkpoint
        def loss(params, x, y):
            h = layer(params[0], x @ codes.astype(jnp.float32))
            narrow = jnp.abs(jax.lax.stop_gradient(h)).astype(dtype)
            h, narrow = mpmd.mark_stage_end((h, narrow))
            return squares(layer(params[1], h + narrow.astype(jnp.float32) * h), y)

        total, grads = trains(params, (xs, ys), loss, 2)
        flipped = (1 - codes.astype(jnp.float32)).astype(dtype)
        return (descend(params, grads), flipped, other), (total, grads, other)

    state = weights(2), signs.astype(dtype), jnp.array([1, 0, 1]).astype(dtype)
    return Case(step, state, batch(), groups=2, options={"donate_argnums": 0}, steps=3)


@program()
def numbers_of_python_everywhere():
    def step(state, xs, ys, rate, decay, nesterov):
        params, momentum = state
        total, grads = trains(params, (xs, ys))
        momentum = jax.tree.map(lambda m, g: decay * m + g, momentum, grads)
        direction = jax.tree.map(lambda m, g: jnp.where(nesterov, decay * m + g, m), momentum, grads)
        return (descend(params, direction, rate), momentum), (total, rate * decay)

    params = weights(3)
    return Case(step, (params, jax.tree.map(jnp.zeros_like, params)), (*batch(), 0.1, 0.9, True))


@program()
def numbers_of_python_that_are_returned():
    """A rate that is fed back stays weak, and leaves weights their half precision."""
    constant = jnp.asarray(1.0)

    def step(state, xs, ys):
        params, rate, count = state

        def run(x, y):
            loss, grads = jax.value_and_grad(mse)(params, x, y)
            return loss, grads, (2.0, constant, jnp.where(loss > 0, 1.0, 2.0))

        total, grads, numbers = loop(run, (xs, ys), operation=(mpmd.Add, mpmd.Add, mpmd.Max))
        made = (
            2.0,
            3,
            True,
            constant,
            jnp.asarray(2),
            jnp.full(2, 0.1),
            jnp.float32(1.0),
            jnp.where(xs > 0, 1, 0),
        )
        given = rate, 2 * rate, count, rate * total, count + 0.5, jnp.where(xs > 0, 1, 0)
        return (descend(params, grads, rate), 0.5, count + 1), (total, numbers, made, given)

    data = [jnp.bfloat16(leaf) for leaf in batch()]
    return Case(step, (weights(3, jnp.bfloat16), 0.1, 0), (*data,), tolerance=2e-2, steps=3)


@program()
def parameters_that_are_numbers():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(jnp.tanh(x * params[0] + params[1]))
        return squares(h * params[2], y)

    def step(state, xs, ys):
        total, grads = trains(state, (xs, ys), loss, 2)
        return descend(state, grads), (total, grads)

    return Case(step, [0.5, 0.1, 1.0], batch(), 2)


@program()
def complex_parameters():
    @jax.checkpoint
    def loss(params, x, y):
        h = mpmd.mark_stage_end(jnp.exp(1j * x) @ params[0])
        h = mpmd.mark_stage_end(h * jnp.abs(h) @ params[1])
        return jnp.mean(jnp.abs(h @ params[2] - y) ** 2)

    def step(state, xs, ys):
        total, grads = trains(state, (xs, ys), loss)
        return jax.tree.map(lambda p, g: p - 0.01 * g.conj(), state, grads), (total, grads)

    def matrix(key):
        real, imaginary = jax.random.normal(key, (2, WIDTH, WIDTH)) / 3
        return real + 1j * imaginary

    return Case(step, [matrix(k) for k in keys(3)], batch(), tolerance=1e-4)
