"""What layers do: bounded, and smooth or nearly so, lest rounding grows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH, BATCH = 4, 2
MATRIX = np.float32(np.random.default_rng(1).normal(size=(WIDTH, WIDTH)) / 2)


def dense(p, h):
    return jnp.tanh(h @ p["w"] + p["b"])


def layer_norm(p, h):
    centred = h - h.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 0.1) * p["b"] / 2


def convolution(p, h):
    return jnp.tanh(lax.conv_general_dilated(h[:, None], p["w"][None, :1, :3], (1,), "SAME")[:, 0])


def unknown_length(p, h):
    """A while loop, which has no derivative."""
    count, total = lax.while_loop(
        lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, jnp.sin(carry[1])), (0, lax.stop_gradient(h))
    )
    return (h + total * count / 3) / 2


WEIGHTED = {
    "dense": dense,
    "linear": lambda p, h: h @ p["w"] / 2,
    "transposed": lambda p, h: h @ p["w"].T / 2,
    "bias": lambda p, h: jnp.sin(h + p["b"]),
    "gather": lambda p, h: (h + jnp.take(p["w"], jnp.arange(len(h)) % 3, axis=0)) / 2,
    "attention": lambda p, h: jax.nn.softmax(jnp.einsum("bi,ij,cj->bc", h, p["w"], h)) @ h,
    "layer_norm": layer_norm,
    "convolution": convolution,
    "triangle": lambda p, h: jnp.tanh(h @ jnp.tril(p["w"])),
    "rows": lambda p, h: lax.scan(lambda h, row: (jnp.tanh(h + row), None), h, p["w"])[0],
    "inner_gradient": lambda p, h: h / 2 + jax.grad(lambda h: jnp.tanh(h @ p["w"]).sum())(h) / 4,
    "table_sum": lambda p, h: (h + jnp.cumsum(p["w"], 0)[-1] / 4) / 2,
}
PLAIN = {
    "tanh": lambda p, h: jnp.tanh(h),
    "relu": lambda p, h: jax.nn.relu(h),
    "cumsum": lambda p, h: jnp.cumsum(h, -1) / WIDTH,
    "sort": lambda p, h: jnp.sort(h, -1),
    "top_k": lambda p, h: lax.top_k(h, WIDTH)[0],
    "mask": lambda p, h: jnp.where(jnp.tril(jnp.ones((len(h), WIDTH), bool)), h, 0.5),
    "constant": lambda p, h: jnp.tanh(h @ jnp.asarray(MATRIX, h.dtype)),
    "fft": lambda p, h: jnp.fft.fft(jnp.float32(h)).real / WIDTH,
    "scatter": lambda p, h: h.at[:, 0].set(h[:, 1]).at[:, 2].add(h[:, 3] / 2),
    "concatenate": lambda p, h: jnp.concatenate([h[:, 2:], jnp.sin(h[:, :2])], -1),
    "while": unknown_length,
    "fori": lambda p, h: lax.fori_loop(0, 2, lambda i, h: jnp.sin(h + i), h),
    "straight_through": lambda p, h: h + lax.stop_gradient(jnp.sin(h) - h),
    "barrier": lambda p, h: lax.optimization_barrier(h),
    "noise": lambda p, h: h + jax.random.normal(jax.random.key(7), h.shape, h.dtype) / 8,
    "zero": lambda p, h: jnp.zeros_like(h),
}
LAYERS = PLAIN | WEIGHTED

# Where they bend, the rounding of few bits makes other gradients altogether.
KINKED = ("relu", "sort", "top_k")


def custom_jvp(f):
    rule = jax.custom_jvp(f)
    rule.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return rule


def custom_vjp(f):
    rule = jax.custom_vjp(f)
    rule.defvjp(functools.partial(jax.vjp, f), lambda pull_back, cotangent: pull_back(cotangent))
    return rule


def scan_over_layers(f):
    def run(p, h):
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), p)
        return lax.scan(lambda h, p: (f(p, h), None), h, stacked, length=2)[0]

    return run


# Transformations of a layer ``f(p, h)``, given the microbatch index.
WRAPS = {
    "jit": lambda f, index: jax.jit(f),
    "checkpoint": lambda f, index: jax.checkpoint(f),
    "checkpoint_dots": lambda f, index: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
    "vmap": lambda f, index: lambda p, h: jax.vmap(f, (None, 0))(p, h[:, None])[:, 0],
    "custom_jvp": lambda f, index: custom_jvp(f),
    "custom_vjp": lambda f, index: custom_vjp(f),
    "scan": lambda f, index: lambda p, h: lax.scan(lambda h, _: (f(p, h), None), h, length=2)[0],
    "scan_over_layers": lambda f, index: scan_over_layers(f),
    "cond": lambda f, index: lambda p, h: lax.cond(index % 2 == 0, f, lambda p, h: h, p, h),
    "cond_value": lambda f, index: lambda p, h: lax.cond((h > -100).all(), f, lambda p, h: h, p, h),
    "scope": lambda f, index: jax.named_scope("transpose(jvp(mine))")(f),
}


def apply(layer, params, h, index):
    """A layer on activations of shape ``(batch, WIDTH)``."""
    p = None
    if layer.weight is not None:
        p = jax.tree.map(lambda leaf: leaf.astype(h.dtype), params[layer.weight])
    if layer.frozen:
        p = lax.stop_gradient(p)

    def f(p, h):
        return LAYERS[layer.operation](p, h).astype(h.dtype)

    for wrap in layer.wraps:
        f = WRAPS[wrap](f, index)
    return f(p, h)
