"""Updates of the state that are more than a rule for each weight."""

import jax
import jax.numpy as jnp

from tests.support.models import WIDTH, batch, descend, layer, mse, weights
from tests.support.programs.table import Case, loop, program, trains


@program()
def an_optimizer_that_knows_the_hessian():
    """Kronecker factors from activations and gradients of the loop, solved after it."""

    def step(state, xs, ys):
        def loss(params, x, y):
            factors = []

            def observed(p, h):
                factors.append(h.T @ h)
                return layer(p, h)

            return mse(params, x, y, observed), jax.lax.stop_gradient(factors)

        (total, factors), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(state, x, y), (xs, ys)
        )
        damped = [jnp.linalg.inv(f / 16 + jnp.eye(WIDTH)) for f in factors]
        new = [
            {"w": p["w"] - 0.1 * inverse @ g["w"], "b": p["b"] - 0.1 * g["b"]}
            for p, g, inverse in zip(state, grads, damped, strict=True)
        ]
        return new, total

    return Case(step, weights(3), batch())


@program()
def an_infinite_loss_scale():
    def step(state, xs, ys):
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

    return Case(step, (weights(3), jnp.float32(jnp.inf), jnp.int32(0)), batch())
