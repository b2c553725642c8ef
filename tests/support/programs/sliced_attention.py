"""Losses over slices of the sequence whose layers attend to the slices before them."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.support.models import CLIPPED_ADAM
from tests.support.programs.architectures import rotated
from tests.support.programs.sliced_models import (
    D_MODEL,
    HEADS,
    LENGTH,
    attend,
    attention_layer,
    causal,
    decoder,
    feed_forward,
    heads_of,
    sliced_loss,
    together,
    token_batch,
    train_slices,
)
from tests.support.programs.table import program


@program()
def slices_with_document_masks():
    """The documents of keys are a part of the batch."""

    def loss(params, batch, targets):
        documents = batch["documents"]

        def layer(p, h, carried, start):
            q, k, v = heads_of(p, h)
            carried = [*(carried or []), (k, v)]
            k, v = together(carried)
            stop = start + h.shape[1]
            same = documents[:, None, start:stop, None] == documents[:, None, None, :stop]
            mixed = attend(q, k, v, causal(start, q.shape[1], k.shape[1]) & same)
            return feed_forward(p, h + mixed.reshape(h.shape) @ p["out"]), carried

        return sliced_loss(layer)(params, batch["tokens"], targets)

    tokens, targets = token_batch()
    documents = jnp.cumsum(jax.random.bernoulli(jax.random.key(3), 0.3, tokens.shape), -1)
    return train_slices(loss, data=({"tokens": tokens, "documents": documents}, targets))


def late_rotary_layer(p, h, carried, start):
    """All keys are given their positions again in each slice."""
    q, k, v = heads_of(p, h)
    carried = [*(carried or []), (k, v)]
    k, v = together(carried)
    mask = causal(start, q.shape[1], k.shape[1])
    mixed = attend(rotated(q, start), rotated(k, 0), v, mask)
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
    return attention_layer(p, h, carried, start, kernel)


LAYERS = {
    "rotary positions": late_rotary_layer,
    "buffers": buffer_layer,
    "kernel": kernel_layer,
}


@program(LAYERS)
def slices_of_attention_with(layer):
    return train_slices(sliced_loss(layer), optimizer=CLIPPED_ADAM)


@program()
def slices_that_read_an_encoder():
    """All slices attend to what the first stage makes once of other inputs."""

    def loss(params, batch, targets):
        memory = jnp.tanh(batch["other"] @ params["encoder"])
        read = memory.reshape(*memory.shape[:2], HEADS, -1)

        def layer(p, h, carried, start):
            h, carried = attention_layer(p, h, carried, start)
            q, *_ = heads_of(p, h)
            return h + attend(q, read, read, True).reshape(h.shape), carried

        return sliced_loss(layer)(params, batch["tokens"], targets)

    tokens, targets = token_batch()
    other = jax.random.normal(jax.random.key(6), (*tokens.shape[:2], 5, D_MODEL))
    params = decoder(encoder=jnp.eye(D_MODEL))
    return train_slices(loss, params, data=({"tokens": tokens, "other": other}, targets))
