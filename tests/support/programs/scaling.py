"""Losses and gradients that are scaled: by counts, by loss scales, by what a microbatch makes of them."""

import math

import jax
import jax.numpy as jnp

from tests.support.models import batch, mse, weights
from tests.support.programs.table import Case, descend, program, trains


def scaled_step(state, xs, ys, decide):
    params, scale, good = state

    def loss(params, x, y):
        return mse(params, x, y) * scale

    total, grads = trains(params, (xs, ys), loss)
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    params = decide(finite, params, grads)
    good = jnp.where(finite, good + 1, 0)
    scale = jnp.where(finite, jnp.where(good % 2 == 0, scale * 2, scale), scale / 2)
    return (params, scale, good), (total / scale, finite)


def decide_with_where(finite, params, grads):
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), descend(params, grads), params)


def decide_with_cond(finite, params, grads):
    return jax.lax.cond(finite, lambda: descend(params, grads), lambda: params)


@program(
    {
        "finite, decide_with_where": (decide_with_where, 1024.0),
        "infinite, decide_with_cond": (decide_with_cond, math.inf),
    },
)
def loss_scaling(how):
    decide, scale = how
    state = (weights(3), jnp.float32(scale), jnp.int32(0))
    return Case(lambda *args: scaled_step(*args, decide), state, batch())
