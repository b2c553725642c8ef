"""A small step whose tasks are captured."""

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

TASKS = ("fwd_0__1", "bwd_1__0", "after_0")
WIDTH, ROWS = 4, 8


def small_step(params, key, x, y):
    """Two stages with dropout, and Adam's moments beside the weights, which are donated."""

    def loss_fn(weights, x, y, key):
        h = jnp.tanh(x @ weights[0])
        h = mpmd.mark_stage_end(h * jax.random.bernoulli(key, 0.9, h.shape))
        return jnp.mean((jnp.tanh(h @ weights[1]) - y) ** 2)

    keys = jax.random.split(key, 2)
    loss, grads = mpmd.treduce(
        lambda mb: jax.value_and_grad(loss_fn)(params[0], *mb),
        (*mpmd.microbatches((x, y), 2), keys),
        schedule=mpmd.Std1F1B(2),
        operation=mpmd.Mean,
    )
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, params[1], grads)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, params[0], moments), moments), loss


def arguments():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(2)]
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return (weights, [np.zeros_like(w) for w in weights]), jax.random.key(0), x, np.tanh(x)
