"""Losses over slices of the sequence whose layers attend to the slices before them."""

import itertools

import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd
from tests.support.models import CLIPPED_ADAM, SGD
from tests.support.programs.sliced_models import (
    D_MODEL,
    HEADS,
    LENGTH,
    attend,
    attention_layer,
    bounds_of,
    causal,
    decoder,
    embedded,
    feed_forward,
    heads_of,
    norm,
    sliced_loss,
    together,
    token_batch,
    token_losses,
    train_slices,
)
from tests.support.programs.table import program

BOUNDS = {
    "equal": (0, 4, 8, 12),
    "of equal work": bounds_of(3),
    "two": (0, 7, 12),
    "last of one token": (0, 6, 11, 12),
    "one": (0, 12),
}


@program(BOUNDS, on_ray={"of equal work"})
def slices_of_attention(bounds):
    slices = len(bounds) - 1
    return train_slices(sliced_loss(bounds=bounds), slices=slices, optimizer=CLIPPED_ADAM)


@program({"batch": True, "carried": False})
def slices_with_document_masks(whole):
    """The documents of keys are a part of the batch, or handed on with the keys."""

    def loss(params, batch, targets):
        bounds, carried, total = bounds_of(3), [None, None], 0.0
        pieces = mpmd.slices((batch, targets), bounds)
        for (start, stop), (piece, y) in zip(itertools.pairwise(bounds), pieces, strict=True):
            h, own = embedded(params, piece["tokens"], start), piece["documents"]
            for i, p in enumerate(params["layers"]):
                q, k, v = heads_of(p, h)
                carried[i] = [*(carried[i] or []), (k, v, own)]
                k, v, documents = together(carried[i])
                if whole:
                    documents = batch["documents"][:, :stop]
                same = own[:, None, :, None] == documents[:, None, None]
                seen = causal(start, q.shape[1], k.shape[1]) & same
                h = feed_forward(p, h + attend(q, k, v, seen).reshape(h.shape) @ p["out"])
                if i == 0:
                    h = mpmd.mark_stage_end(h)
            total += token_losses(params, h, y).sum()
        return total / targets.size

    tokens, targets = token_batch()
    ends = jax.random.bernoulli(jax.random.key(3), 0.3, tokens.shape)
    documents = jnp.cumsum(ends, -1)
    return train_slices(loss, data=({"tokens": tokens, "documents": documents}, targets))


def rotated(x, start):
    """Rotary positions of ``[rows, length, heads, 2 * pairs]``."""
    pairs = x.shape[-1] // 2
    angles = (start + jnp.arange(x.shape[1]))[:, None] / 100 ** (jnp.arange(pairs) / pairs)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def rotary_layer(p, h, carried, start):
    """Keys are handed on with their positions in them."""
    q, k, v = heads_of(p, h)
    carried = [*(carried or []), (rotated(k, start), v)]
    k, v = together(carried)
    mask = causal(start, q.shape[1], k.shape[1])
    return feed_forward(p, h + attend(rotated(q, start), k, v, mask).reshape(h.shape) @ p["out"]), carried


def late_rotary_layer(p, h, carried, start):
    """All keys are given their positions again in each slice."""
    q, k, v = heads_of(p, h)
    carried = [*(carried or []), (k, v)]
    k, v = together(carried)
    mask = causal(start, q.shape[1], k.shape[1])
    mixed = attend(rotated(q, start), rotated(k, 0), v, mask)
    return feed_forward(p, h + mixed.reshape(h.shape) @ p["out"]), carried


def window_layer(p, h, carried, start, window=4):
    """Attention to the last tokens alone, so a slice hands on a few of them."""
    q, k, v = heads_of(p, h)
    if carried is not None:
        k, v = (jnp.concatenate(pair, 1) for pair in zip(carried, (k, v), strict=True))
    before = k.shape[1] - q.shape[1]
    places = jnp.arange(k.shape[1])[None] - (before + jnp.arange(q.shape[1])[:, None])
    h = h + attend(q, k, v, (places <= 0) & (places > -window)).reshape(h.shape) @ p["out"]
    return feed_forward(p, h), (k[:, 1 - window :], v[:, 1 - window :])


def shared_heads_layer(p, h, carried, start):
    """One head of keys and values for all heads of queries."""
    q, k, v = heads_of(p, h)
    carried = [*(carried or []), (k[:, :, :1], v[:, :, :1])]
    k, v = (jnp.repeat(each, HEADS, 2) for each in together(carried))
    mask = causal(start, q.shape[1], k.shape[1])
    return feed_forward(p, h + attend(q, k, v, mask).reshape(h.shape) @ p["out"]), carried


def library_layer(p, h, carried, start):
    q, k, v = heads_of(p, h)
    carried = [*(carried or []), (k, v)]
    k, v = together(carried)
    mask = causal(start, q.shape[1], k.shape[1])[None, None]
    mixed = jax.nn.dot_product_attention(q, k, v, mask=mask)
    return feed_forward(p, h + mixed.reshape(h.shape) @ p["out"]), carried


def buffer_layer(p, h, carried, start):
    """Keys and values of all slices are in buffers for the whole sequence."""
    q, k, v = heads_of(p, h)
    if carried is None:
        carried = tuple(jnp.zeros((k.shape[0], LENGTH, *k.shape[2:])) for _ in "kv")
    carried = tuple(
        lax.dynamic_update_slice_in_dim(buffer, each, start, 1)
        for buffer, each in zip(carried, (k, v), strict=True)
    )
    mixed = attend(q, *carried, causal(start, q.shape[1], LENGTH))
    return feed_forward(p, h + mixed.reshape(h.shape) @ p["out"]), carried


@jax.custom_vjp
def kernel(q, k, v, mask):
    return attend(q, k, v, mask)


def _kernel_forward(q, k, v, mask):
    return attend(q, k, v, mask), (q, k, v, mask)


def _kernel_backward(kept, cotangent):
    *arrays, mask = kept
    return *jax.vjp(lambda q, k, v: attend(q, k, v, mask), *arrays)[1](cotangent), None


kernel.defvjp(_kernel_forward, _kernel_backward)


def kernel_layer(p, h, carried, start):
    """Attention with a derivative of its own, which computes the scores again."""
    q, k, v = heads_of(p, h)
    carried = [*(carried or []), (k, v)]
    k, v = together(carried)
    mixed = kernel(q, k, v, causal(start, q.shape[1], k.shape[1]))
    return feed_forward(p, h + mixed.reshape(h.shape) @ p["out"]), carried


def detached_layer(p, h, carried, start):
    """No gradient goes to the slices before, as in Transformer-XL."""
    return attention_layer(p, h, jax.tree.map(lax.stop_gradient, carried), start)


def nested_layer(p, h, carried, start):
    return jax.jit(attention_layer, static_argnums=3)(p, h, carried, start)


LAYERS = {
    "rotary positions": rotary_layer,
    "rotary positions of all keys": late_rotary_layer,
    "window": window_layer,
    "shared heads": shared_heads_layer,
    "library": library_layer,
    "buffers": buffer_layer,
    "kernel": kernel_layer,
    "no gradient to slices before": detached_layer,
    "jit": nested_layer,
}


@program(LAYERS)
def slices_of_attention_with(layer):
    return train_slices(sliced_loss(layer), optimizer=CLIPPED_ADAM)


@program()
def slices_with_learned_keys():
    """All slices of a layer attend to keys that are weights, which stand before the sequence."""

    def layer(p, h, carried, start):
        p, first = p
        q, k, v = heads_of(p, h)
        carried = [*(carried or []), (k, v)]
        k, v = together(
            [tuple(jnp.broadcast_to(each, (len(h), *each.shape[1:])) for each in first), *carried]
        )
        mask = causal(start + first[0].shape[1], q.shape[1], k.shape[1])
        return feed_forward(p, h + attend(q, k, v, mask).reshape(h.shape) @ p["out"]), carried

    params = decoder()
    learned = jax.random.normal(jax.random.key(5), (2, 2, 1, 3, HEADS, D_MODEL // HEADS)) / 2
    params["layers"] = [(p, tuple(own)) for p, own in zip(params["layers"], learned, strict=True)]
    return train_slices(sliced_loss(layer), params, optimizer=CLIPPED_ADAM)


@program()
def slices_that_read_an_encoder():
    """All slices attend to what the first stage makes once of other inputs."""

    def loss(params, batch, targets):
        bounds, carried, total = bounds_of(3), [None, None], 0.0
        memory = jnp.tanh(batch["other"] @ params["encoder"])
        pieces = mpmd.slices((batch["tokens"], targets), bounds)
        for start, (x, y) in zip(bounds[:-1], pieces, strict=True):
            h = embedded(params, x, start)
            for i, p in enumerate(params["layers"]):
                h, carried[i] = attention_layer(p, h, carried[i], start)
                q, *_ = heads_of(p, h)
                read = memory.reshape(*memory.shape[:2], HEADS, -1)
                h = h + attend(q, read, read, True).reshape(h.shape)
                if i == 0:
                    h = mpmd.mark_stage_end(h)
            total += token_losses(params, h, y).sum()
        return total / targets.size

    tokens, targets = token_batch()
    other = jax.random.normal(jax.random.key(6), (*tokens.shape[:2], 5, D_MODEL))
    params = decoder(encoder=jnp.eye(D_MODEL))
    return train_slices(loss, params, data=({"tokens": tokens, "other": other}, targets))


@program()
def slices_of_keys_in_the_mark():
    """The mark has the keys of the stage's layer, too, which the next stage's layer reads."""

    def loss(params, tokens, targets):
        bounds, carried, total = bounds_of(3), [], 0.0
        for start, (x, y) in zip(bounds[:-1], mpmd.slices((tokens, targets), bounds), strict=True):
            first, second = params["layers"]
            h, own = attention_layer(first, embedded(params, x, start), None, 0)
            h, (pair,) = mpmd.mark_stage_end((h, own))
            carried.append(pair)
            q, *_ = heads_of(second, h)
            k, v = together(carried)
            mixed = attend(q, k, v, causal(start, q.shape[1], k.shape[1]))
            total += token_losses(params, feed_forward(second, h + mixed.reshape(h.shape)), y).sum()
        return total / targets.size

    return train_slices(loss)


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lion": optax.lion(1e-2),
    "lamb": optax.lamb(1e-2),
    "every second step": optax.MultiSteps(SGD, 2),
}


@program(OPTIMIZERS)
def slices_with_optimizer(optimizer):
    return train_slices(sliced_loss(), optimizer=optimizer)


@program()
def slices_of_experts():
    """Each slice chooses experts for its tokens, with a loss for their balance."""
    experts = 3

    def loss(params, tokens, targets):
        bounds, carried, total, balance = bounds_of(3), [None, None], 0.0, 0.0
        for start, (x, y) in zip(bounds[:-1], mpmd.slices((tokens, targets), bounds), strict=True):
            h, of_slice = embedded(params, x, start), 0.0
            for i, p in enumerate(params["layers"]):
                h, carried[i] = attention_layer(p, h, carried[i], start)
                chances = jax.nn.softmax(norm(h) @ p["router"])
                chosen = jax.nn.one_hot(jnp.argmax(chances, -1), experts)
                of_slice += experts * jnp.sum(chosen.mean((0, 1)) * chances.mean((0, 1)))
                made = jnp.tanh(jnp.einsum("bse,bsd,edf->bsf", chosen, norm(h), p["experts"]))
                h = h + jnp.sum(chances * chosen, -1, keepdims=True) * made
                if i == 0:
                    h, of_slice = mpmd.mark_stage_end((h, of_slice))
            balance += of_slice
            total += token_losses(params, h, y).sum()
        return total / targets.size + 0.01 * balance

    params = decoder()
    for i, p in enumerate(params["layers"]):
        router, weights = jax.random.split(jax.random.key(i))
        p["router"] = jax.random.normal(router, (D_MODEL, experts))
        p["experts"] = jax.random.normal(weights, (experts, D_MODEL, D_MODEL)) / 3
    return train_slices(loss, params, optimizer=CLIPPED_ADAM)
