"""Models whose scans over layers carry integers and flags, or look up rows in each layer."""

import jax
import jax.numpy as jnp
from jax import lax

import mpmd
from tests.support.models import BATCH, CLIPPED_ADAM, layer
from tests.support.programs.scanned_layers import WEIGHTS, squares, stacked
from tests.support.programs.table import program, train


def marked(h):
    return mpmd.mark_stage_end(h, every=2)


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


@program({"halting": halting, "counts": counting_some_layers})
def integers_that_come_to_depend_on_the_data(model):
    def loss(params, x, y):
        return squares(model(params["layers"], x), y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


def permuted(take):
    """Layers in which ``take`` permutes rows as the data says."""

    def loss(params, x, y):
        order = jnp.argsort(y, -1)

        def body(h, weights):
            return marked(take(weights, h, order)), None

        return squares(lax.scan(body, x, params["layers"])[0], y)

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


@program(PERMUTED)
def layers_that_look_up_each_row(take):
    return train(permuted(take), stacked(), holds=WEIGHTS)
