"""Losses over slices of the sequence whose layers hand a state of constant size to the next slice."""

import jax
import jax.numpy as jnp
from jax import lax

import mpmd
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

CONVOLVED = 3


def selective_layer(p, h, state, start):
    """A selective state space, as in Mamba: a recurrence whose decay depends on the token."""
    x, gate = jnp.split(norm(h) @ p["in"], 2, -1)
    x = jax.nn.silu(x)
    step = jax.nn.softplus(x @ p["step"])
    decay, taken = jnp.exp(-step), step * x
    if state is None:
        state = jnp.zeros_like(x[:, 0])

    def next_state(state, token):
        decay, taken = token
        state = decay * state + taken
        return state, state

    state, states = lax.scan(next_state, state, (jnp.moveaxis(decay, 1, 0), jnp.moveaxis(taken, 1, 0)))
    return h + (jnp.moveaxis(states, 0, 1) * jax.nn.silu(gate)) @ p["out"], state


def convolved_layer(p, h, carried, start):
    """A short causal convolution before the recurrence: the last tokens are handed on, too."""
    before, state = carried or (jnp.zeros_like(h[:, : CONVOLVED - 1]), None)
    padded = jnp.concatenate([before, h], 1)
    length = h.shape[1]
    mixed = sum(padded[:, i : i + length] * p["taps"][i] for i in range(CONVOLVED))
    made, state = selective_layer(p, mixed, state, start)
    return h + made, (padded[:, 1 - CONVOLVED :], state)


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
    """Parameters of all layers of this file."""
    params = decoder(layers)
    for p, key in zip(params["layers"], keys(layers), strict=True):
        names = {
            "in": (D_MODEL, 2 * D_MODEL),
            "step": (D_MODEL, D_MODEL),
            "taps": (CONVOLVED, D_MODEL),
            "rate": (D_MODEL, HEADS),
        }
        for number, (name, shape) in enumerate(names.items()):
            p[name] = jax.random.normal(jax.random.fold_in(key, number), shape) / 3
    return params


LAYERS = {
    "selective state": selective_layer,
    "convolution and state": convolved_layer,
    "delta rule": delta_layer,
}


@program(LAYERS)
def slices_of_states(layer):
    loss = sliced_loss(layer, bounds=mpmd.slice_bounds(12, 3))
    return train_slices(loss, recurrent_params(), optimizer=CLIPPED_ADAM)


@program()
def slices_of_layers_of_two_kinds():
    """A stage of recurrent layers, and one of attention."""

    def loss_of(params, tokens, targets):
        kinds = iter([delta_layer, attention_layer] * 3)

        def layer(p, h, carried, start):
            return next(kinds)(p, h, carried, start)

        return sliced_loss(layer)(params, tokens, targets)

    return train_slices(loss_of, recurrent_params(), optimizer=CLIPPED_ADAM)
