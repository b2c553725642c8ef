"""What may happen inside a stage: rematerialisation, operations, derivatives by hand."""

import jax
import jax.numpy as jnp

from tests.support.models import BATCH, batch, descend, layer, mse, weights
from tests.support.programs.table import Case, loop, program, stages_of

OPERATIONS = {
    "associative scan": lambda p, h: layer(p, jax.lax.associative_scan(jnp.multiply, h, axis=1)),
    "convolution": lambda p, h: jnp.tanh(
        jax.lax.conv_general_dilated(h[None, None], p["w"][None, None], (1, 1), "SAME")[0, 0] + p["b"]
    ),
    "pooling": lambda p, h: layer(p, jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "SAME")),
    "linear solve": lambda p, h: layer(p, jnp.linalg.solve(jnp.eye(BATCH) * 3 + h @ h.T, h)),
    "cholesky": lambda p, h: layer(p, jnp.linalg.cholesky(jnp.eye(BATCH) + h @ h.T)),
    "dynamic slice": lambda p, h: layer(
        p, jax.lax.dynamic_slice(jnp.tile(h, 2), (0, jnp.argmax(h[0])), h.shape)
    ),
    "quantised": lambda p, h: h @ (jnp.round(p["w"] * 16).astype(jnp.int8).astype(jnp.float32) / 16) + p["b"],
}
"""Beside those that random programs have."""


@program(OPERATIONS)
def stages_with(stage):
    return stages_of(stage)


@program()
def linearised_and_transposed_by_hand():
    def step(state, xs, ys):
        def run(x, y):
            loss, tangent = jax.linearize(lambda p: mse(p, x, y), state)
            return loss, jax.linear_transpose(tangent, state)(jnp.float32(1.0))[0]

        total, grads = loop(run, (xs, ys))
        return descend(state, grads), (total, grads)

    return Case(step, weights(3), batch())
