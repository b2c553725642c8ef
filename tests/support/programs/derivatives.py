"""Derivatives inside a stage: rules of one's own, and gradients of gradients."""

from functools import partial

import jax
import jax.numpy as jnp

import mpmd
from tests.support.models import batch, layer, mse, weights
from tests.support.programs.table import Case, descend, loop, program, stages_of, train, trains


@program()
def custom_vjp_around_the_mark():
    """A boundary that quantises what it passes on, both ways."""

    @jax.custom_vjp
    def narrow(h):
        return h.astype(jnp.bfloat16).astype(jnp.float32)

    narrow.defvjp(lambda h: (narrow(h), None), lambda _, g: (g.astype(jnp.bfloat16).astype(jnp.float32),))

    def loss(params, x, y):
        h = narrow(mpmd.mark_stage_end(narrow(layer(params[0], x))))
        return jnp.mean((layer(params[1], h) - y) ** 2)

    return train(loss, weights(2), stages=2, tolerance=1e-3)


@program()
def derivatives_of_a_stage_in_its_forward():
    """Forward mode, Hessians and Jacobians: a physics-informed loss."""

    def stage(params, h):
        def unit(row):
            return jnp.sum(layer(params, row))

        slopes = jax.jvp(lambda h: layer(params, h), (h,), (jnp.ones_like(h),))[1]
        curvature = jax.vmap(lambda row: jnp.diagonal(jax.hessian(unit)(row)))(h)
        return layer(params, h) + 0.1 * slopes + 0.1 * curvature

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


def linear(params, x):
    """A model without nonlinearities, whose gradient is the transposed model of the error."""
    for i, stage in enumerate(params):
        x = x @ stage["w"]
        if i < len(params) - 1:
            x = mpmd.mark_stage_end(x)
    return x


def linear_in_a_scan(params, x):
    def body(h, layer):
        return mpmd.mark_stage_end(h @ layer["w"], num_stages=3), None

    return jax.lax.scan(body, x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *params, *params))[0]


def of_the_transposed(model):
    """The loss of a transposed model alone: its stages are passed in the order in which it applies them."""
    return lambda params, x, y: jnp.mean((jax.linear_transpose(partial(model, params), x)(y)[0] - x) ** 2)


def of_the_error(model):
    """The transposed model of the error, as in a backward."""

    def loss(params, x, y):
        error = jax.lax.stop_gradient(model(params, x) - y)
        return jnp.mean(jax.linear_transpose(partial(model, params), x)(error)[0] ** 2)

    return loss


TRANSPOSED = {
    "alone": (of_the_transposed(linear), True),
    "in a scan": (of_the_transposed(linear_in_a_scan), True),
    "of the error": (of_the_error(linear), False),
    "of the error in a scan": (of_the_error(linear_in_a_scan), False),
}


@program(TRANSPOSED)
def transposed_models(arguments):
    loss, is_trained = arguments

    def step(state, xs, ys):
        if not is_trained:
            return state, loop(lambda x, y: loss(state, x, y), (xs, ys))
        total, grads = trains(state, (xs, ys), loss)
        return descend(state, grads), total

    return Case(step, weights(3), batch())


@program()
def fixed_point_with_implicit_gradient():
    @jax.custom_vjp
    def solve(w, h):
        return jax.lax.fori_loop(0, 20, lambda _, z: jnp.tanh(0.1 * z @ w + h), jnp.zeros_like(h))

    def backward(residuals, g):
        w, h, z = residuals
        _, back = jax.vjp(lambda w, h, z: jnp.tanh(0.1 * z @ w + h), w, h, z)
        u = jax.lax.fori_loop(0, 20, lambda _, u: g + back(u)[2], g)
        return back(u)[:2]

    solve.defvjp(lambda w, h: ((z := solve(w, h)), (w, h, z)), backward)
    return stages_of(lambda p, h: solve(p["w"], h) + p["b"])
