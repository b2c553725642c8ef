"""A train step of a small transformer whose stages are open, and shapes and arrays for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

WIDTH, HEADS, HIDDEN, LENGTH, ROWS, VOCABULARY = 32, 4, 64, 16, 8, 64


def normed(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def block(layer, x):
    h = normed(x, layer["attention_norm"])
    q, k, v = ((h @ layer[name]).reshape(*x.shape[:2], HEADS, -1) for name in ("q", "k", "v"))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(x.shape) @ layer["o"]
    return x + jax.nn.gelu(normed(x, layer["norm"]) @ layer["up"]) @ layer["down"]


def loss_of(params, tokens):
    x = params["table"][tokens]
    for layer in params["blocks"]:
        x = block(layer, x)
    scores = jax.nn.log_softmax(normed(x, params["norm"]) @ params["head"])
    return -jnp.mean(jnp.take_along_axis(scores, tokens[..., None], -1))


def scanned_loss_of(params, tokens):
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), params["table"][tokens], params["blocks"])
    return jnp.mean(jnp.square(normed(x, params["norm"]) @ params["head"]))


def train_step(params, tokens, loss=loss_of):
    value, grads = mpmd.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


scanned_step = functools.partial(train_step, loss=scanned_loss_of)


def shapes(num_layers=2, width=WIDTH, length=LENGTH, rows=ROWS, vocabulary=VOCABULARY):
    """The shapes of parameters and tokens."""

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block_shapes = {
        "attention_norm": of(width),
        "norm": of(width),
        "up": of(width, 2 * width),
        "down": of(2 * width, width),
        **{name: of(width, width) for name in ("q", "k", "v", "o")},
    }
    params = {
        "table": of(vocabulary, width),
        "head": of(width, vocabulary),
        "norm": of(width),
        "blocks": [block_shapes] * num_layers,
    }
    return params, jax.ShapeDtypeStruct((rows, length), jnp.int32)


def arguments(**sizes):
    """Parameters and tokens."""
    numbers = np.random.default_rng(0)
    params, tokens = shapes(**sizes)
    params = jax.tree.map(lambda p: jnp.asarray(numbers.normal(size=p.shape) / 6, p.dtype), params)
    return params, jnp.asarray(numbers.integers(0, VOCABULARY, tokens.shape), tokens.dtype)


def stacked_arguments():
    """Parameters with the blocks stacked, and tokens."""
    params, tokens = arguments(num_layers=4)
    return {**params, "blocks": jax.tree.map(lambda *p: jnp.stack(p), *params["blocks"])}, tokens
