"""Losses over slices of the sequence whose layers hand a state of constant size to the next slice."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.support.models import CLIPPED_ADAM, keys
from tests.support.programs.sliced_models import (
    D_MODEL,
    HEADS,
    attention_layer,
    decoder,
    heads_of,
    norm,
    sliced_loss,
    train_slices,
)
from tests.support.programs.table import program


def delta_layer(p, h, state, start):
    """The delta rule: a matrix for each head, from which the old value of a key is taken before a new one."""
    q, k, v = heads_of(p, h)
    k = k * lax.rsqrt(jnp.sum(k**2, -1, keepdims=True) + 1e-6)
    rate = jax.nn.sigmoid(jnp.einsum("bld,dh->blh", norm(h), p["rate"]))
    if state is None:
        state = jnp.zeros((len(h), HEADS, D_MODEL // HEADS, D_MODEL // HEADS))

    def next_state(state, token):
        q, k, v, rate = token
        old = jnp.einsum("bhkv,bhk->bhv", state, k)
        state = state + jnp.einsum("bhk,bhv->bhkv", k, rate[..., None] * (v - old))
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    tokens = jax.tree.map(lambda each: jnp.moveaxis(each, 1, 0), (q, k, v, rate))
    state, read = lax.scan(next_state, state, tokens)
    return h + jnp.moveaxis(read, 0, 1).reshape(h.shape) @ p["out"], state


def recurrent_params(layers=2):
    """Parameters of layers of both kinds."""
    params = decoder(layers)
    for p, key in zip(params["layers"], keys(layers), strict=True):
        p["rate"] = jax.random.normal(key, (D_MODEL, HEADS)) / 3
    return params


@program()
def slices_of_layers_of_two_kinds():
    """A stage of recurrent layers, and one of attention."""

    def loss_of(params, tokens, targets):
        kinds = iter([delta_layer, attention_layer] * 3)

        def layer(p, h, carried, start):
            return next(kinds)(p, h, carried, start)

        return sliced_loss(layer)(params, tokens, targets)

    return train_slices(loss_of, recurrent_params(), optimizer=CLIPPED_ADAM)
