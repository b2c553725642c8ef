"""A warning where a mark in a scan makes stages of what are no layers."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpmd
from mpmd.errors import SharedWeightsWarning, StepWarning
from tests.support.models import WIDTH, layer, planned, sgd_step, weights

TIME, GROUPS = 6, 3


def marked(h):
    return mpmd.mark_stage_end(h, num_stages=GROUPS)


def over_time(params, x):
    def body(h, seen):
        return marked(layer(params, h + seen)), None

    return lax.scan(body, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[0]


def one_layer_again_and_again(params, x):
    return lax.scan(lambda h, _: (marked(layer(params, h)), None), x, None, TIME)[0]


def layers_that_read_data_of_their_own(params, x):
    """And a table that they share."""
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * TIME), params)

    def body(h, given):
        own, seen = given
        return marked(layer(own, h + seen @ params["w"])), None

    return lax.scan(body, jnp.zeros_like(x[:, 0]), (stacked, jnp.swapaxes(x, 0, 1)))[0]


def lowered(model):
    step = sgd_step(lambda params, x: jnp.mean(model(params, x) ** 2), mpmd.Std1F1B(GROUPS))
    return planned(step, weights(1)[0], jnp.ones((4, 4, TIME, WIDTH)), groups=GROUPS)


def test_scans_over_data_share_their_weights():
    with pytest.warns(
        SharedWeightsWarning, match=r"mark_stage_end at .*test_scans_over_data.*around such scans"
    ):
        lowered(over_time)
    assert issubclass(SharedWeightsWarning, StepWarning)


@pytest.mark.parametrize("model", [one_layer_again_and_again, layers_that_read_data_of_their_own])
def test_other_scans_do_not(model):
    lowered(model)
