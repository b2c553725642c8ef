"""A small decoder whose loss is a loop over slices of the sequence, as users write it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import mpmd
from tests.support.models import keys
from tests.support.programs.table import train

D_MODEL, HEADS, VOCABULARY, LENGTH, ROWS = 8, 2, 11, 12, 2


def decoder(layers=2, **others):
    """Parameters: an embedding, positions, layers of attention and a feed-forward part, and a head."""

    def dense(key, *shape):
        return jax.random.normal(key, shape) / np.sqrt(shape[0])

    embed, positions, head, *of_layers = keys(3 + layers)
    return {
        "embed": dense(embed, VOCABULARY, D_MODEL),
        "positions": dense(positions, LENGTH, D_MODEL),
        "layers": [layer_params(key, dense) for key in of_layers],
        "head": dense(head, D_MODEL, VOCABULARY),
        **others,
    }


def layer_params(key, dense):
    qkv, out, up, down = jax.random.split(key, 4)
    return {
        "qkv": dense(qkv, D_MODEL, 3 * D_MODEL),
        "out": dense(out, D_MODEL, D_MODEL),
        "up": dense(up, D_MODEL, 2 * D_MODEL),
        "down": dense(down, 2 * D_MODEL, D_MODEL),
    }


def token_batch(microbatches=3):
    """Tokens and targets, int32[microbatches, ROWS, LENGTH] each."""
    (key,) = keys(1)
    xs = jax.random.randint(key, (microbatches, ROWS, LENGTH), 0, VOCABULARY)
    return xs, jnp.roll(xs, -1, -1)


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def feed_forward(p, h):
    return h + jax.nn.gelu(norm(h) @ p["up"]) @ p["down"]


def heads_of(p, h):
    """Queries, keys and values, ``[rows, length, heads, width]`` each."""
    made = (norm(h) @ p["qkv"]).reshape(*h.shape[:2], 3, HEADS, -1)
    return made[:, :, 0], made[:, :, 1], made[:, :, 2]


def causal(start, queries, key_count):
    """Which keys the queries from ``start`` on see, ``bool[queries, keys]``."""
    return jnp.arange(key_count)[None] <= start + jnp.arange(queries)[:, None]


def attend(q, k, v, mask):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
    weights = jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)


def together(chunks):
    """The keys and values of all slices up to now, of lists of those of each."""
    return (jnp.concatenate(of_slices, 1) for of_slices in zip(*chunks, strict=True))


def attention_layer(p, h, carried, start):
    """A layer on a slice; ``carried`` has the keys and values of the slices before it, a list of pairs."""
    q, k, v = heads_of(p, h)
    carried = [*(carried or []), (k, v)]
    k, v = together(carried)
    h = h + attend(q, k, v, causal(start, q.shape[1], k.shape[1])).reshape(h.shape) @ p["out"]
    return feed_forward(p, h), carried


def position_by_position(p, h, carried, start):
    """A layer in which no token reads another."""
    return feed_forward(p, h), carried


def embedded(params, x, start):
    return params["embed"][x] + params["positions"][start : start + x.shape[1]]


def token_losses(params, h, y):
    """Cross entropies, ``float32[rows, length]``."""
    return optax.softmax_cross_entropy_with_integer_labels(norm(h) @ params["head"], y)


def bounds_of(slices):
    """Unequal slices of the sequence, as attention needs them."""
    return mpmd.slice_bounds(LENGTH, slices, attention_share=0.5)


def sliced_loss(layer=attention_layer, slices=3, bounds=None, stages=2, embed=embedded):
    """The mean loss of all tokens, slice by slice, with a mark between stages.

    ``layer(p, h, carried, start)`` returns ``h`` and what the layer hands to the next slice; the first slice
    takes ``None``.
    """
    bounds = bounds or bounds_of(slices)

    def loss(params, tokens, targets):
        ends = mpmd.stage_ends(len(params["layers"]), stages)
        carried, total = [None] * len(params["layers"]), 0.0
        for start, (x, y) in zip(bounds[:-1], mpmd.slices((tokens, targets), bounds), strict=True):
            h = embed(params, x, start)
            for i, p in enumerate(params["layers"]):
                h, carried[i] = layer(p, h, carried[i], start)
                if i in ends:
                    h = mpmd.mark_stage_end(h)
            total += token_losses(params, h, y).sum()
        return total / targets.size

    return loss


def train_slices(loss, params=None, slices=3, *, data=None, **of_case):
    """The case of a loss over slices, of a model of two stages."""
    schedule = mpmd.Seq1F1B(2, slices)
    return train(loss, params or decoder(), schedule=schedule, data=data or token_batch(), **of_case)
