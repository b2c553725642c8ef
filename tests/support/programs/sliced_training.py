"""Training steps over slices of the sequence."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import CLIPPED_ADAM, descend, init, stack
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
    sliced_loss,
    together,
    token_batch,
    token_losses,
    train_slices,
)
from tests.support.programs.table import Case, program


@program()
def slices_of_scans_with_marks():
    """One scan over all layers in each slice, with a mark in its body."""

    def loss(params, tokens, targets):
        bounds, total, chunks = bounds_of(2), 0.0, []
        for start, (x, y) in zip(bounds[:-1], mpmd.slices((tokens, targets), bounds), strict=True):

            def body(h, layer, start=start):
                p, before = layer
                h, carried = attention_layer(p, h, list(before), start)
                return mpmd.mark_stage_end(h, num_stages=2), carried[-1]

            h, own = lax.scan(body, embedded(params, x, start), (params["stack"], tuple(chunks)))
            chunks.append(own)
            total += token_losses(params, h, y).sum()
        return total / targets.size

    params = decoder(4)
    params["stack"] = stack(params.pop("layers"))
    return train_slices(loss, params, slices=2, optimizer=CLIPPED_ADAM)


@program()
def slices_with_a_count_that_each_microbatch_carries():
    """A carry of the loop, which the last slice of the last stage updates once per microbatch."""

    def step(state, xs, ys):
        params, mean = state

        def of_microbatch(mean, mb):
            loss, grads = jax.value_and_grad(sliced_loss(slices=2))(params, *mb)
            return 0.9 * mean + 0.1 * loss, (loss, grads)

        mean, (total, grads) = mpmd.treduce(
            of_microbatch, (xs, ys), mpmd.Seq1F1B(2, 2), operation=mpmd.Add, carry=mean
        )
        return (descend(params, grads), mean), (total, grads)

    return Case(step, (decoder(), jnp.float32(1)), token_batch(), 2)


@program()
def slices_of_inputs_that_are_differentiated():
    """Embeddings are the batch, and their gradients are a result."""
    loss = sliced_loss(embed=lambda params, x, start: x)

    def step(params, xs, ys):
        total, (grads, of_inputs) = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss, (0, 1))(params, *mb),
            (xs, ys),
            mpmd.Seq1F1B(2, 3),
            operation=(mpmd.Add, (mpmd.Add, mpmd.Concat())),
        )
        return descend(params, grads), (total, of_inputs)

    tokens, targets = token_batch()
    params = decoder()
    return Case(step, params, (np.asarray(params["embed"])[tokens], targets), 2)


@program({"rows": True, "weights": False})
def slices_on_groups_of_two_devices(by_rows):
    """Data parallel, or with weights in shards."""
    rows = P(None, "fsdp") if by_rows else P()
    state = init(decoder(), CLIPPED_ADAM)
    weights = jax.tree.map(lambda leaf: P("fsdp") if leaf.ndim == 2 and len(leaf) % 2 == 0 else P(), state)
    specs = (P() if by_rows else weights, rows, rows)
    options = {"in_specs": specs}
    loss = sliced_loss(slices=2)
    return train_slices(loss, slices=2, optimizer=CLIPPED_ADAM, axes={"fsdp": 2}, options=options)


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


@program()
def slices_of_attention_with_buffers():
    return train_slices(sliced_loss(buffer_layer), optimizer=CLIPPED_ADAM)


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
