"""Losses over a sharded batch, whose gradients are sums over examples on several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.collectives import collectives_of
from tests.support.models import sgd_step
from tests.support.parity import assert_parity_on, mesh_of

D = 8
MICROBATCHES, ROWS = 2, 4
BATCH = P(None, "data")
ONE_F_ONE_B = mpmd.Std1F1B(2)


def normal(seed, *shape):
    """An array of numpy, so that modules with arrays of their own compile nothing when they are imported."""
    return np.float32(np.random.default_rng(seed).normal(size=shape) * 0.3)


XS = normal(1, MICROBATCHES, ROWS, D)
TOKENS = np.random.default_rng(9).integers(0, D, (MICROBATCHES, ROWS, 3), np.int32)


def on_second_stage(loss):
    """``loss`` behind a stage that has nothing to do with it, as a loop needs two."""

    def staged(params, x):
        first = lax.stop_gradient(params["first"])
        zero = mpmd.mark_stage_end(jnp.dot(first, first))
        return loss(params["second"], x + zero.astype(x.dtype))

    return staged


def train(loss, schedule=ONE_F_ONE_B):
    """A step of gradient descent; ``loss`` takes parameters and a microbatch."""
    return sgd_step(loss, schedule)


def run(step, params, xs, axes=None, tolerance=2e-5, **options):
    """Compares a step with plain JAX. Returns it, its collectives in microbatches, and those outside."""
    with mesh_of(2, **(axes or {"data": 2})) as mesh:
        options = {"in_specs": (P(), BATCH), "donate_argnums": 0, **options}
        loaded = assert_parity_on(mesh, step, params, xs, tolerance=tolerance, **options)
        return loaded, *collectives_of(loaded, mesh)


def with_first(params):
    return {"first": jnp.zeros(3), "second": params}


def mean(h):
    return jnp.mean(h**2)


def dense(params, x):
    return mean(jnp.tanh(x @ params["w"] + params["b"]) * params["scale"][:, None].T)


def embedded(params, x):
    h = params["table"][x] + params["positions"][: x.shape[1]]
    logits = h @ params["table"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), x[..., None], -1))


def scanned(params, x, wrap=lambda f: f):
    """A scan over layers, whose gradients are stacked."""

    def layer(h, p):
        return h + jax.nn.gelu(h @ p["up"] + p["b"]) @ p["down"], None

    return mean(lax.scan(wrap(layer), x, params)[0])


def shared_in_scan(params, x, wrap=lambda f: f):
    """A scan over time with the same weights, whose gradients are carried."""
    return mean(lax.scan(wrap(lambda h, _: (jnp.tanh(h @ params["w"]), h)), x, None, length=3)[0])


def nested_scans(params, x):
    def layer(h, w):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=2)[0], None

    return mean(lax.scan(layer, x, params["layers"])[0])


def split_weights(params, x):
    q, k = jnp.split(params["qk"], 2, axis=-1)
    joined = jnp.concatenate([params["a"], params["b"]])
    return mean((x @ q) * (x @ k) @ joined)


def masked_weights(params, x):
    mask = jnp.arange(D)[:, None] >= jnp.arange(D)
    return mean(x @ jnp.where(mask, params["w"], 0.0)) + mean(x @ (params["v"] * mask))


def weight_penalty(params, x):
    return mean(x @ params["w"]) + 0.1 * jnp.sum(params["w"] ** 2)


def casts_of_weights(params, x):
    h = x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
    return mean(h.astype(jnp.float32))


def merged_dimensions(params, x):
    h = x.reshape(ROWS, 2, D // 2)
    h = jnp.einsum("btd,df->btf", h, params["w"]).reshape(-1, D // 2)
    return mean(jnp.tanh(h) @ params["w"])


w = normal(2, D, D)
LAYERS = {"layers": normal(3, 2, D, D)}
STACKED = {"up": normal(4, 2, D, 2 * D), "b": normal(5, 2, 2 * D), "down": normal(6, 2, 2 * D, D)}
DENSE = {"w": w, "b": np.zeros(D, np.float32), "scale": np.ones(D, np.float32)}
TABLE = {"table": normal(7, D, 4), "positions": normal(8, 5, 4)}

IN_PARTS = {
    "dense": (dense, DENSE, XS),
    "embedded": (embedded, TABLE, TOKENS),
    "checkpointed scan": (functools.partial(scanned, wrap=jax.checkpoint), STACKED, XS),
    "weights that a checkpointed scan shares": (
        functools.partial(shared_in_scan, wrap=jax.checkpoint),
        {"w": w},
        XS,
    ),
    "nested scans": (nested_scans, LAYERS, XS),
    "split weights": (split_weights, {"qk": normal(3, D, 2 * D), "a": w[:3], "b": w[3:]}, XS),
    "masked weights": (masked_weights, {"w": w, "v": w}, XS),
    "weight penalty": (weight_penalty, {"w": w}, XS),
    "casts of weights": (casts_of_weights, {"w": w}, XS),
    "merged dimensions": (merged_dimensions, {"w": normal(2, D // 2, D // 2)}, XS),
}


def mlp(params, x):
    for i, p in enumerate(params):
        x = jnp.tanh(x @ p["w"] + p["b"])
        if i < len(params) - 1:
            x = mpmd.mark_stage_end(x)
    return mean(x)


def mlp_weights():
    return [{"w": normal(i, D, D), "b": jnp.zeros(D)} for i in range(2)]


FSDP = ([{"w": P("data"), "b": P()}] * 2, BATCH)
MANY_ROWS = normal(1, MICROBATCHES, 64, D)
"""More than weights are large, so that XLA moves weights and not activations."""
WEIGHT, BIAS = 4 * D * D, 4 * D
