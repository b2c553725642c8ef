"""Models that take the weights of their layers from a stack by a counter."""

import jax
import jax.numpy as jnp
from jax import lax

import mpmd
from tests.support.models import BATCH, CLIPPED_ADAM, layer
from tests.support.programs.scanned_layers import LAYERS, WEIGHTS, squares, stacked
from tests.support.programs.table import program, train


def marked(h):
    return mpmd.mark_stage_end(h, every=2)


def row(params, i):
    return jax.tree.map(lambda leaf: leaf[i], params)


def in_a_fori_loop(params, x):
    return lax.fori_loop(0, LAYERS, lambda i, h: marked(layer(row(params, i), h)), x)


def from_a_range(take):
    """A scan over numbers, each of which ``take``s the weights of its layer."""

    def run(params, x):
        def body(h, i):
            return marked(layer(jax.tree.map(lambda leaf: take(leaf, i), params), h)), None

        return lax.scan(body, x, jnp.arange(LAYERS))[0]

    return run


def counted_in_the_carry(params, x):
    """Of which only the biases are taken by the counter, which a key is folded with, too."""

    def body(carry, w):
        h, i = carry
        h = layer({"w": w, "b": params["b"][i]}, h)
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(1), i), 0.8, h.shape)
        return (marked(jnp.where(kept, h, 0)), i + 1), None

    return lax.scan(body, (x, jnp.int32(0)), params["w"])[0][0]


def with_weights_in_the_carry(params, x):
    def body(i, carry):
        params, h = carry
        return params, marked(layer(row(params, i), h))

    return lax.fori_loop(0, LAYERS, body, (params, x))[1]


def two_in_an_iteration(params, x):
    def body(i, h):
        h = layer(row(params, 2 * i), h)
        return mpmd.mark_stage_end(layer(row(params, 2 * i + 1), h))

    return lax.fori_loop(0, LAYERS // 2, body, x)


def windows_of_two(params, x):
    def body(i, h):
        taken = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, 2 * i, 2), params)
        return mpmd.mark_stage_end(layer(row(taken, 1), layer(row(taken, 0), h)))

    return lax.fori_loop(0, LAYERS // 2, body, x)


def with_statistics(params, x):
    """Those of each layer are written by the counter, and read at the end."""

    def body(i, carry):
        h, squared, largest = carry
        h = marked(layer(row(params, i), h))
        return h, squared.at[i].set(jnp.mean(h**2)), largest.at[i].add(jnp.max(h))

    h, squared, largest = lax.fori_loop(0, LAYERS, body, (x, jnp.zeros(LAYERS), jnp.ones(LAYERS)))
    return h + 0.1 * jnp.sum(squared) * jnp.prod(largest)


MODELS = {
    "fori_loop": in_a_fori_loop,
    "dynamic_index_in_dim": from_a_range(lambda leaf, i: lax.dynamic_index_in_dim(leaf, i, keepdims=False)),
    "take": from_a_range(lambda leaf, i: jnp.take(leaf, i, axis=0)),
    "at": from_a_range(lambda leaf, i: leaf.at[i].get(mode="fill", fill_value=0)),
    "counter in the carry": counted_in_the_carry,
    "weights in the carry": with_weights_in_the_carry,
    "two in an iteration": two_in_an_iteration,
    "windows of two": windows_of_two,
    "statistics": with_statistics,
}

REMAT = {
    "layer": lambda params, x: lax.fori_loop(
        0, LAYERS, jax.checkpoint(lambda i, h: marked(layer(row(params, i), h))), x
    ),
    "layer without the mark": lambda params, x: lax.fori_loop(
        0,
        LAYERS,
        lambda i, h: marked(jax.checkpoint(lambda params, h: layer(row(params, i), h))(params, h)),
        x,
    ),
    "all layers": jax.checkpoint(in_a_fori_loop),
}


def trained(model):
    def loss(params, x, y):
        return squares(model(params["layers"], x), y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program(MODELS, on_ray={"fori_loop"})
def layers_taken_by_a_counter(model):
    return trained(model)


@program(REMAT)
def layers_taken_by_a_counter_under_remat(model):
    return trained(model)


def halting(params, x):
    """A flag is known before the first layer, and depends on the data after it."""

    def body(carry, weights):
        h, is_done = carry
        h = jnp.where(is_done, h, layer(weights, h))
        return (marked(h), is_done | (jnp.mean(h, -1, keepdims=True) > 0.1)), None

    return lax.scan(body, (x, jnp.zeros((BATCH, 1), bool)), params)[0][0]


def counting_some_layers(params, x):
    """One count depends on the data, the other one follows it a layer behind."""

    def body(carry, weights):
        h, count, before = carry
        h = layer(weights, h) * (1 + 0.1 * before)
        return (marked(h), jnp.where(jnp.mean(h) > 0, count + 1, count), count), count

    (h, count, _), counts = lax.scan(body, (x, jnp.int32(0), jnp.int32(0)), params)
    return h * (1 + 0.1 * count) + jnp.sum(counts)


@program({"halting": halting, "counts": counting_some_layers}, usual={"halting"})
def integers_that_come_to_depend_on_the_data(model):
    return trained(model)


def permuted(take):
    """Layers that are taken by the counter, in which ``take`` permutes what the data says."""

    def loss(params, x, y):
        order = jnp.argsort(y, -1)

        def body(i, h):
            return marked(take(row(params["layers"], i), h, order))

        return squares(lax.fori_loop(0, LAYERS, body, x), y)

    return loss


PERMUTED = {
    "activations": lambda params, h, order: jnp.take_along_axis(layer(params, h), order, -1),
    "weights": lambda params, h, order: layer(
        {"w": jnp.take_along_axis(params["w"], order, -1), "b": params["b"]}, h
    ),
    "rows of a batch": lambda params, h, order: jax.vmap(lambda row, i: row[i])(layer(params, h), order),
    "updated rows": lambda params, h, order: jax.vmap(
        lambda row, i: lax.dynamic_update_index_in_dim(row, 2 * row[0], i[0], 0)
    )(layer(params, h), order),
}
"""The gradient of each is a scatter with batch dimensions, or it is one itself."""


@program(PERMUTED, usual={"activations"})
def layers_taken_by_a_counter_that_look_up_each_row(take):
    return train(permuted(take), stacked(), holds=WEIGHTS)
