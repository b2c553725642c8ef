"""Derivatives inside a stage: rules of one's own, and gradients of gradients."""

import jax
import jax.numpy as jnp

import mpmd
from tests.support.models import batch, layer, mse, weights
from tests.support.programs.table import Case, descend, loop, program, stages_of, train


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
