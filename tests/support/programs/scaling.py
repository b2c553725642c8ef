"""Losses and gradients that are scaled: by counts, by loss scales, by what a microbatch makes of them."""

import math

import jax
import jax.numpy as jnp
import optax

from tests.support.models import batch, mlp, mse, weights
from tests.support.programs.table import Case, descend, loop, program


@program(["added up", "counted before the loop", "weights of tokens"], usual={"added up"})
def gradients_divided_by_a_token_count(how):
    def step(state, xs, ys):
        def loss(params, x, y):
            mask = y[..., 0] > 0
            mask = jnp.where(mask, jnp.abs(y[..., 1]), 0.0) if how == "weights of tokens" else mask
            per_token = jnp.mean((mlp(params, x) - y) ** 2, -1)
            return jnp.sum(per_token * mask), jnp.sum(mask)

        (total, count), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(state, x, y), (xs, ys)
        )
        if how == "counted before the loop":
            count = jnp.sum(ys[..., 0] > 0)
        grads = jax.tree.map(lambda g: g / count, grads)
        return descend(state, grads), (total / count, grads, count)

    return Case(step, weights(3), batch())


@program()
def a_loss_divided_by_a_count_of_all_microbatches_within_the_loop():
    def step(state, xs, ys):
        count = jnp.maximum(jnp.sum(ys[..., 0] > 0), 1)

        def loss(params, x, y):
            per_token = jnp.mean((mlp(params, x) - y) ** 2, -1)
            return jnp.sum(jnp.where(y[..., 0] > 0, per_token, 0)) / count

        total, grads = loop(lambda x, y: jax.value_and_grad(loss)(state, x, y), (xs, ys))
        return descend(state, grads), (total, grads)

    return Case(step, weights(3), batch())


def scaled_step(state, xs, ys, decide):
    params, scale, good = state

    def loss(params, x, y):
        return mse(params, x, y) * scale

    total, grads = loop(lambda x, y: jax.value_and_grad(loss)(params, x, y), (xs, ys))
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


def decide_with_cond_of_operands(finite, params, grads):
    return jax.lax.cond(finite, descend, lambda params, grads: params, params, grads)


@program(
    {
        f"{'in' if math.isinf(scale) else ''}finite, {decide.__name__}": (decide, scale)
        for decide in (decide_with_where, decide_with_cond, decide_with_cond_of_operands)
        for scale in (1024.0, math.inf)
    },
    on_ray={"infinite, decide_with_cond"},
    usual={"finite, decide_with_where"},
)
def loss_scaling(how):
    decide, scale = how
    state = (weights(3), jnp.float32(scale), jnp.int32(0))
    return Case(lambda *args: scaled_step(*args, decide), state, batch())


@program({"where": False, "cond": True})
def a_step_that_depends_on_the_loss(conditional):
    def step(state, xs, ys):
        params, best = state
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(params, x, y), (xs, ys))
        improved = total < best
        if conditional:
            params = jax.lax.cond(
                improved, lambda p, g: descend(p, g), lambda p, g: descend(p, g, 0.01), params, grads
            )
        else:
            params = descend(params, grads, jnp.where(improved, 0.1, 0.01))
        return (params, jnp.minimum(best, total)), (total, improved)

    return Case(step, (weights(3), jnp.float32(4.0)), batch())


@program()
def second_moments_of_microbatch_gradients():
    def step(state, xs, ys):
        def both(x, y):
            grads = jax.grad(mse)(state, x, y)
            return grads, jax.tree.map(jnp.square, grads)

        grads, squares = loop(both, (xs, ys))
        scaled = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + 0.1), grads, squares)
        return descend(state, scaled), (grads, squares)

    return Case(step, weights(3), batch())


@program()
def gradients_clipped_in_every_microbatch():
    """Differentially private training: the norm is of all stages, before the sum over microbatches."""

    def step(state, xs, ys):
        def clipped(x, y):
            loss, grads = jax.value_and_grad(mse)(state, x, y)
            norm = optax.tree.norm(grads)
            return loss, jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)

        total, grads = loop(clipped, (xs, ys))
        return descend(state, grads), (total, grads)

    return Case(step, weights(3), batch())


@program()
def gradients_scaled_by_the_loss_in_every_microbatch():
    def step(state, xs, ys):
        def scaled(x, y):
            loss, grads = jax.value_and_grad(mse)(state, x, y)
            return loss, jax.tree.map(lambda g: g * jnp.tanh(loss), grads)

        total, grads = loop(scaled, (xs, ys))
        return descend(state, grads), (total, grads)

    return Case(step, weights(3), batch())
