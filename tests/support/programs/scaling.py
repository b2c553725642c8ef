"""Losses and gradients that are scaled: by counts, by loss scales, by what a microbatch makes of them."""

import math

import jax
import jax.numpy as jnp

from tests.support.models import batch, mse, weights
from tests.support.programs.table import Case, descend, program, trains


def scaled_step(state, xs, ys):
    params, scale, good = state

    def loss(params, x, y):
        return mse(params, x, y) * scale

    total, grads = trains(params, (xs, ys), loss)
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    params = jax.lax.cond(finite, lambda: descend(params, grads), lambda: params)
    good = jnp.where(finite, good + 1, 0)
    scale = jnp.where(finite, jnp.where(good % 2 == 0, scale * 2, scale), scale / 2)
    return (params, scale, good), (total / scale, finite)


@program()
def an_infinite_loss_scale():
    state = (weights(3), jnp.float32(math.inf), jnp.int32(0))
    return Case(scaled_step, state, batch())
