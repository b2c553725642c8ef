"""Training steps over slices of the sequence: what codes do besides attention."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import CLIPPED_ADAM, init
from tests.support.programs.sliced_models import (
    attention_layer,
    bounds_of,
    decoder,
    embedded,
    schedule_of,
    sliced_loss,
    token_batch,
    token_losses,
    train_slices,
)
from tests.support.programs.table import Case, descend, program


@program({"written out": False, "remat": True})
def slices_of_scanned_layers(remat):
    """Each stage scans over its layers, and the keys of these are stacked."""

    def loss(params, tokens, targets):
        bounds, total = bounds_of(2), 0.0
        chunks = [[], []]
        for start, (x, y) in zip(bounds[:-1], mpmd.slices((tokens, targets), bounds), strict=True):
            h = embedded(params, x, start)
            for stage in range(2):
                layers = jax.tree.map(lambda leaf, s=stage: leaf[2 * s : 2 * s + 2], params["stack"])

                def body(h, layer, start=start):
                    p, before = layer
                    h, carried = attention_layer(p, h, list(before), start)
                    return h, carried[-1]

                body = jax.checkpoint(body) if remat else body
                h, own = lax.scan(body, h, (layers, tuple(chunks[stage])))
                chunks[stage].append(own)
                if stage == 0:
                    h = mpmd.mark_stage_end(h)
            total += token_losses(params, h, y).sum()
        return total / targets.size

    params = decoder(4)
    layers = params.pop("layers")
    params["stack"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return train_slices(loss, params, slices=2, optimizer=CLIPPED_ADAM)


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
    params["stack"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.pop("layers"))
    return train_slices(loss, params, slices=2, optimizer=CLIPPED_ADAM)


@program()
def slices_with_gradients_clipped_by_microbatch():
    def step(params, xs, ys):
        def clipped(mb):
            loss, grads = jax.value_and_grad(sliced_loss())(params, *mb)
            norm = optax.tree.norm(grads)
            return loss, jax.tree.map(lambda g: g / jnp.maximum(norm, 0.1), grads)

        total, grads = mpmd.treduce(clipped, (xs, ys), schedule_of(), operation=mpmd.Add)
        return descend(params, grads), (total, grads)

    return Case(step, decoder(), token_batch(), 2)


@program()
def slices_with_a_count_that_each_microbatch_carries():
    """A carry of the loop, which the last slice of the last stage updates once per microbatch."""

    def step(state, xs, ys):
        params, mean = state

        def of_microbatch(mean, mb):
            loss, grads = jax.value_and_grad(sliced_loss(slices=2))(params, *mb)
            return 0.9 * mean + 0.1 * loss, (loss, grads)

        mean, (total, grads) = mpmd.treduce(
            of_microbatch, (xs, ys), schedule_of(slices=2), operation=mpmd.Add, carry=mean
        )
        return (descend(params, grads), mean), (total, grads)

    return Case(step, (decoder(), jnp.float32(1)), token_batch(), 2)


@program()
def slices_one_row_at_a_time():
    """The loss of a row, mapped over the rows."""

    def loss(params, tokens, targets):
        of_row = jax.vmap(lambda x, y: sliced_loss()(params, x[None], y[None]))
        return of_row(tokens, targets).mean()

    return train_slices(loss)


@program()
def slices_of_inputs_that_are_differentiated():
    """Embeddings are the batch, and their gradients are a result."""
    loss = sliced_loss(embed=lambda params, x, start: x)

    def step(params, xs, ys):
        total, (grads, of_inputs) = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss, (0, 1))(params, *mb),
            (xs, ys),
            schedule_of(),
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
