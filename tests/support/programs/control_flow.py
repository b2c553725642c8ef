"""What may happen inside a stage: rematerialisation, operations, derivatives by hand."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import mpmd
from tests.support.models import BATCH, WIDTH, batch, descend, layer, mse, squares, weights
from tests.support.programs.table import Case, loop, program, stages_of, train


def two_layers(params, h):
    h = checkpoint_name(jnp.tanh(h @ params["w"]), "hidden")
    return jnp.tanh(h @ params["w"].T + params["b"])


@program()
def checkpoint_by_names():
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    return stages_of(jax.checkpoint(two_layers, policy=policy))


OPERATIONS = {
    "cumulative": lambda p, h: layer(p, jnp.cumsum(h, -1) - jax.lax.cummax(h, axis=1)),
    "associative scan": lambda p, h: layer(p, jax.lax.associative_scan(jnp.multiply, h, axis=1)),
    "convolution": lambda p, h: jnp.tanh(
        jax.lax.conv_general_dilated(h[None, None], p["w"][None, None], (1, 1), "SAME")[0, 0] + p["b"]
    ),
    "pooling": lambda p, h: layer(p, jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "SAME")),
    "fourier transform": lambda p, h: layer(p, jnp.fft.irfft(jnp.fft.rfft(h) * (1 + 1j), n=WIDTH)),
    "linear solve": lambda p, h: layer(p, jnp.linalg.solve(jnp.eye(BATCH) * 3 + h @ h.T, h)),
    "cholesky": lambda p, h: layer(p, jnp.linalg.cholesky(jnp.eye(BATCH) + h @ h.T)),
    "scatter": lambda p, h: layer(p, jnp.zeros_like(h).at[jnp.argmax(h, 0)].add(h, mode="drop")),
    "gather": lambda p, h: jnp.take_along_axis(layer(p, h), jnp.argsort(h, -1), -1),
    "dynamic slice": lambda p, h: layer(
        p, jax.lax.dynamic_slice(jnp.tile(h, 2), (0, jnp.argmax(h[0])), h.shape)
    ),
    "quantised": lambda p, h: h @ (jnp.round(p["w"] * 16).astype(jnp.int8).astype(jnp.float32) / 16) + p["b"],
    "random projection": lambda p, h: layer(p, h @ jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))),
    "complex": lambda p, h: jnp.abs(layer(p, h) * jnp.exp(1j * h)),
}


@program(OPERATIONS)
def stages_with(stage):
    return stages_of(stage)


@program()
def custom_vjp_around_the_mark():
    """A boundary that quantises what it passes on, both ways."""

    @jax.custom_vjp
    def narrow(h):
        return h.astype(jnp.bfloat16).astype(jnp.float32)

    narrow.defvjp(lambda h: (narrow(h), None), lambda _, g: (g.astype(jnp.bfloat16).astype(jnp.float32),))

    def loss(params, x, y):
        h = narrow(mpmd.mark_stage_end(narrow(layer(params[0], x))))
        return squares(layer(params[1], h), y)

    return train(loss, weights(2), stages=2, tolerance=1e-3)


@program()
def linearised_and_transposed_by_hand():
    def step(state, xs, ys):
        def run(x, y):
            loss, tangent = jax.linearize(lambda p: mse(p, x, y), state)
            return loss, jax.linear_transpose(tangent, state)(jnp.float32(1.0))[0]

        total, grads = loop(run, (xs, ys))
        return descend(state, grads), (total, grads)

    return Case(step, weights(3), batch())
