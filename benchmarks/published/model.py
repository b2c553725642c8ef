"""The models of published steps as steps of plain JAX, and their profiles.

Their dropout is left out: XLA computes its masks within the kernels that read them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shaped
from jax import lax

import mpmd
from benchmarks.published.facts import Model
from mpmd.planner.layer_profile import LayerProfile, TaskWork
from mpmd.planner.profiling.open_step import profile_step

HALF = jnp.bfloat16
# Half of the scores are masked. The backward computes them again: five products for two of the forward.
_FLASH = mpmd.cost(
    functools.partial(jax.nn.dot_product_attention, is_causal=True), forward=0.5, backward=0.625
)
# Products of the tokens of each row, sorted by their experts.
_BY_ROWS = lax.RaggedDotDimensionNumbers((([2], [1]), ([], [])), [1], [0])
TRACED_LAYERS, ROWS, MICROBATCHES = 3, 8, 2


@functools.cache
def profile_of(model: Model) -> LayerProfile:
    """The profile of a model's step, for a batch of ``ROWS * MICROBATCHES`` rows.

    Its layers are the embedding, the blocks, and the head with the loss. Few blocks are traced, and one of
    them stands for all.
    """
    traced = dataclasses.replace(model, layers=TRACED_LAYERS)
    (profile,) = profile_step(step_of(traced), _arguments(traced), {}).profiles
    embedding, _, block, *_, head = profile.layers
    layers = (embedding, *[block] * model.layers, head)
    shared = sum(nbytes for _, nbytes in profile.tied)
    weights = (sum(layer.weights for layer in some) - shared for some in (layers, profile.layers))
    more = next(weights) / next(weights)
    outside = TaskWork(*(more * number for number in dataclasses.astuple(profile.outside)[:4]))
    tied = tuple(((0, len(layers) - 1), nbytes) for _, nbytes in profile.tied)
    return dataclasses.replace(profile, layers=layers, outside=outside, tied=tied, num_microbatches=None)


def step_of(model: Model):
    """A train step of ``(state, tokens)``: adam on weights in float32, gradients in the weights' dtype.

    Without ``float32_weights`` the loop reads weights in half precision, of which the optimizer keeps a copy
    in float32.
    """

    def step(state, tokens):
        weights = state["weights"]
        loss, gradients = mpmd.treduce(
            lambda batch: jax.value_and_grad(lambda weights: _loss(model, weights, batch))(weights),
            tokens,
            schedule=mpmd.GPipe(model.layers + 2),
            operation=mpmd.Mean,
        )
        new = jax.tree.map(_adam, gradients, state["mean"], state["variance"], state.get("master", weights))
        mean, variance, master = (
            jax.tree.map(lambda _, leaves, i=i: leaves[i], gradients, new) for i in range(3)
        )
        kept = {"mean": mean, "variance": variance}
        if not model.float32_weights:
            kept["master"] = master
        return {"weights": jax.tree.map(lambda w, m: m.astype(w.dtype), weights, master), **kept}, loss

    return step


def _adam(gradient, mean, variance, weight):
    gradient = gradient.astype(jnp.float32)
    mean = 0.9 * mean + 0.1 * gradient
    variance = 0.95 * variance + 0.05 * gradient * gradient
    return mean, variance, weight.astype(jnp.float32) - 1e-4 * mean * lax.rsqrt(variance + 1e-8)


def _arguments(model: Model):
    dtype = jnp.float32 if model.float32_weights else HALF
    size, key_heads = model.head_size, model.key_heads or model.heads
    hidden = model.hidden or 4 * model.width

    def block():
        shapes = {
            "norm_1": (model.width,),
            "norm_2": (model.width,),
            "q": (model.width, model.heads, size),
            "o": (model.heads, size, model.width),
            "up": (model.width, hidden),
            "down": (hidden, model.width),
        }
        if model.gated:
            shapes |= {"gate": (model.width, hidden)}
            shapes |= dict.fromkeys(("k", "v"), (model.width, key_heads, size))
        else:
            # One product has queries, keys and values: heads are the major dimension.
            shapes["q"] = (model.width, model.heads, 3, size)
        if model.experts:
            shapes |= {name: (model.experts, *shapes[name]) for name in ("up", "gate", "down")}
            shapes["router"] = (model.width, model.experts)
        return shapes

    shapes = {
        "embedding": (model.vocabulary, model.width),
        "blocks": [block() for _ in range(model.layers)],
        "norm": (model.width,),
    }
    if not model.megatron:
        shapes["head"] = (model.width, model.vocabulary)
    is_shape = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    weights = jax.tree.map(lambda shape: Shaped(shape, dtype), shapes, is_leaf=is_shape)
    moments = jax.tree.map(lambda weight: Shaped(weight.shape, jnp.float32), weights)
    state = {"weights": weights, "mean": moments, "variance": moments}
    if not model.float32_weights:
        state["master"] = moments
    return state, Shaped((MICROBATCHES, ROWS, model.length + 1), jnp.int32)


def _loss(model: Model, weights, tokens):
    weights = jax.tree.map(lambda weight: weight.astype(HALF), weights)
    x = weights["embedding"][tokens[:, :-1]]
    for layer in weights["blocks"]:
        x = _block(model, layer, mpmd.mark_stage_end(x))
    x = mpmd.mark_stage_end(x)
    head = weights["embedding"].T if model.megatron else weights["head"]
    logits = (_norm(x, weights["norm"]) @ head).astype(jnp.float32)
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(losses)


def _block(model: Model, layer, x):
    h = _norm(x, layer["norm_1"])
    if model.gated:
        q, k, v = (jnp.einsum("btd,dhe->bthe", h, layer[name]) for name in "qkv")
        q, k = _rotated(q), _rotated(k)
    else:
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dhce->bthce", h, layer["q"]), 3, 0)
    x = x + jnp.einsum("bthe,hed->btd", _attention(model, q, k, v), layer["o"])
    h = _norm(x, layer["norm_2"])
    if model.experts:
        return x + _mixture(model, layer, h)
    if model.gated:
        return x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    return x + jax.nn.gelu(h @ layer["up"]) @ layer["down"]


def _mixture(model: Model, layer, x):
    """The sum over the best experts of each token, of which an expert has any number."""
    shares, chosen = lax.top_k(jax.nn.softmax(x @ layer["router"]), model.best)
    shares, chosen = (values.reshape(len(x), -1) for values in (shares, chosen))
    order = jnp.argsort(chosen)
    sizes = jax.vmap(functools.partial(jnp.bincount, length=model.experts))(chosen)
    sent = jnp.take_along_axis(x, order[..., None] // model.best, 1)
    gates, ups = (lax.ragged_dot_general(sent, layer[name], sizes, _BY_ROWS) for name in ("gate", "up"))
    made = lax.ragged_dot_general(jax.nn.silu(gates) * ups, layer["down"], sizes, _BY_ROWS)
    made = jnp.take_along_axis(made, jnp.argsort(order)[..., None], 1) * shares[..., None]
    return made.reshape(*x.shape[:2], model.best, model.width).sum(2)


def _rotated(x):
    """Rotary positions."""
    angles = jnp.arange(x.shape[1])[:, None, None] / 1e4 ** (jnp.arange(x.shape[-1] // 2) * 2 / x.shape[-1])
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _attention(model: Model, q, k, v):
    if model.attention == "flash":
        return _FLASH(q, k, v)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), -1e9)).astype(scores.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v)


def _norm(x, scale):
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale
