"""Small models of the field: a model that prunes its tokens, and diffusion."""

import jax
import jax.numpy as jnp

import mpmd
from tests.support.models import BATCH, MICROBATCHES, WIDTH, batch, descend, layer, mse, squares, weights
from tests.support.programs.table import Case, loop, program, train


@program()
def tokens_pruned_between_stages():
    """Later stages see only the rows that an earlier one chose."""

    def loss(params, x, y):
        h = layer(params[0], x)
        kept = jax.lax.top_k(jnp.linalg.norm(h, axis=-1), 2)[1]
        h, kept = mpmd.mark_stage_end((h[kept], kept))
        h = mpmd.mark_stage_end(layer(params[1], h))
        return squares(layer(params[2], h), y[kept])

    def holds(loaded):
        (labels,) = loaded.plan.inputs[-1].mpmd_idxs
        assert labels > 0, "the labels are where the rows are chosen, not behind"

    return train(loss, weights(3), holds=holds)


@program()
def diffusion():
    """Times and noise are drawn before the loop, and read by the first and the last stage."""

    def step(state, xs, ys):
        params, key = state
        key, times_key, noise_key = jax.random.split(key, 3)
        times = jax.random.uniform(times_key, (MICROBATCHES, BATCH, 1))
        noise = jax.random.normal(noise_key, xs.shape)

        def loss(params, x, t, e):
            position = jnp.sin(t * jnp.arange(1, WIDTH + 1))
            noisy = jnp.sqrt(1 - t) * x + jnp.sqrt(t) * e
            return mse(params, noisy, e, lambda p, h: layer(p, h + position))

        total, grads = loop(lambda *mb: jax.value_and_grad(loss)(params, *mb), (xs, times, noise))
        return (descend(params, grads), key), (total, grads)

    return Case(step, (weights(3), jax.random.key(0)), batch())
