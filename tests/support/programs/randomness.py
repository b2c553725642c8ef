"""Keys: in the state, in the anchor, of the microbatch; dropout and other noise."""

import jax
import jax.numpy as jnp

import mpmd
from tests.support.models import BATCH, MICROBATCHES, WIDTH, batch, layer, mse, weights
from tests.support.programs.table import Case, descend, loop, program, trains


def dropout(key, h, rate=0.5):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, h.shape), h / (1 - rate), 0)


def noisy_mlp(params, x, key):
    """Every stage folds its number into the key that came with the microbatch."""
    h = x
    for i, stage in enumerate(params):
        h = dropout(jax.random.fold_in(key, i), layer(stage, h))
        if i < len(params) - 1:
            h = mpmd.mark_stage_end(h)
    return h


@program()
def keys_of_every_stage_in_the_state():
    def step(state, xs, ys):
        params, keys = state
        both = jax.vmap(jax.random.split)(keys)

        def loss(params, x, y):
            h = x
            for i, stage in enumerate(params):
                h = dropout(both[i, 1], layer(stage, h))
                if i < 2:
                    h = mpmd.mark_stage_end(h)
            return jnp.mean((h - y) ** 2)

        total, grads = trains(params, (xs, ys), loss)
        return (descend(params, grads), both[:, 0]), (total, grads)

    return Case(
        step,
        (weights(3), jax.random.split(jax.random.key(0), 3)),
        batch(),
        warns="draws the same random numbers",
    )


@program()
def keys_returned_as_results():
    def step(state, xs, ys):
        params, key = state
        key, sub, extra = jax.random.split(key, 3)

        def loss(params, x, y):
            return jnp.mean((noisy_mlp(params, x, sub) - y) ** 2)

        total, grads = trains(params, (xs, ys), loss)
        return (descend(params, grads), key), (total, extra, jax.random.key_data(sub), sub)

    return Case(step, (weights(3), jax.random.key(0)), batch(), warns="draws the same random numbers")


@program()
def microbatches_in_random_order():
    def step(state, xs, ys):
        params, key = state
        key, sub = jax.random.split(key)
        order = jax.random.permutation(sub, len(xs))
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(params, x, y), (xs[order], ys[order]))
        return (descend(params, grads), key), (total, grads)

    return Case(step, (weights(3), jax.random.key(0)), batch())


@program()
def diffusion():
    """Times and noise are drawn before the loop, and read by the first and the last stage."""

    def step(state, xs, ys):
        params, key = state
        key, times_key, noise_key = jax.random.split(key, 3)
        times = jax.random.uniform(times_key, (MICROBATCHES, BATCH, 1))
        noise = jax.random.normal(noise_key, xs.shape)

        def loss(params, x, t, e):
            h = jnp.sqrt(1 - t) * x + jnp.sqrt(t) * e
            for i, stage in enumerate(params):
                h = layer(stage, h + jnp.sin(t * jnp.arange(1, WIDTH + 1)))
                if i < 2:
                    h = mpmd.mark_stage_end(h)
            return jnp.mean((h - e) ** 2)

        total, grads = loop(lambda *mb: jax.value_and_grad(loss)(params, *mb), (xs, times, noise))
        return (descend(params, grads), key), (total, grads)

    return Case(step, (weights(3), jax.random.key(0)), batch())
