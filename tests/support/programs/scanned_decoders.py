"""Scanned decoders as training codes write them, and other bodies of more than one operation."""

import jax
import jax.numpy as jnp
from jax import lax

import mpmd
from tests.support.models import CLIPPED_ADAM
from tests.support.programs.architectures import block, causal, token_batches, transformer, word_loss
from tests.support.programs.scanned_layers import LAYERS, WEIGHTS, squares, stacked
from tests.support.programs.table import program, train


def decoder():
    params = transformer(LAYERS)
    return params | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"])}


@program()
def layers_of_two_kinds_in_a_switch():
    """Attention of all tokens and of near ones, by a number for each layer."""

    def loss(params, tokens, targets):
        mask = causal()
        near = mask & ~jnp.tril(mask, -3)

        def body(h, layer):
            p, kind = layer
            h = lax.switch(kind, [lambda h: block(p, h, near), lambda h: block(p, h, mask)], h)
            return mpmd.mark_stage_end(h, every=2), None

        h, _ = lax.scan(body, params["table"][tokens], (params["blocks"], jnp.arange(LAYERS) % 2))
        return word_loss(params, h, targets)

    return train(loss, decoder(), data=token_batches(4), optimizer=CLIPPED_ADAM)


@program()
def stacks_that_the_backward_reads_in_several_ways():
    """What a scan stacks is read by rows and as a whole; its constants are made in the forward."""

    def loss(params, x, y):
        gate = jnp.exp(-(x**2))

        def body(h, p):
            product = h @ p["w"] + p["b"]
            h = jnp.sin(product * gate * 2 + product**3) * gate
            return mpmd.mark_stage_end(h, every=2), h * 2

        h, doubled = lax.scan(body, x, params["layers"])
        return squares(h, y) + jnp.sum(jnp.tanh(doubled) ** 2) / 100

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)
