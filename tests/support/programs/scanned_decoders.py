"""Scanned decoders as training codes write them, and other bodies of more than one operation."""

import jax.numpy as jnp
from jax import lax

import mpmd
from tests.support.models import CLIPPED_ADAM, stack
from tests.support.programs.scanned_layers import LAYERS
from tests.support.programs.sliced_models import (
    LENGTH,
    attend,
    causal,
    decoder,
    feed_forward,
    heads_of,
    token_batch,
    token_losses,
)
from tests.support.programs.table import program, train


@program()
def layers_of_two_kinds_in_a_switch():
    """Attention of all tokens and of near ones, by a number for each layer."""

    def loss(params, tokens, targets):
        mask = causal(0, LENGTH, LENGTH)
        near = mask & ~jnp.tril(mask, -3)

        def block(p, h, mask):
            return feed_forward(p, h + attend(*heads_of(p, h), mask).reshape(h.shape) @ p["out"])

        def body(h, layer):
            p, kind = layer
            h = lax.switch(kind, [lambda h: block(p, h, near), lambda h: block(p, h, mask)], h)
            return mpmd.mark_stage_end(h, every=2), None

        h, _ = lax.scan(body, params["embed"][tokens], (params["layers"], jnp.arange(LAYERS) % 2))
        return token_losses(params, h, targets).mean()

    params = decoder(LAYERS)
    params["layers"] = stack(params["layers"])
    return train(loss, params, data=token_batch(), optimizer=CLIPPED_ADAM)
