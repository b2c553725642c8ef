"""Marked loops that take rows by a counter are refused, with the lines to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpmd
from tests.support.models import WIDTH, planned, sgd_step

LAYERS = 4
W = jnp.ones((LAYERS, WIDTH, WIDTH))
TABLE = np.ones((LAYERS, WIDTH, WIDTH), np.float32)


def layer(w, h):
    return mpmd.mark_stage_end(jnp.tanh(h @ w))


def smoothed(h):
    return lax.fori_loop(0, LAYERS, lambda i, h: jnp.tanh(h @ jnp.asarray(TABLE)[i]), h)


def over(numbers, take):
    return lambda w, x: lax.scan(lambda h, i: (layer(take(w, i), h), None), x, numbers)[0]


def counted_in_the_carry(w, x):
    one = jnp.ones((), int)

    def body(carry, _):
        h, i = carry
        return (layer(w[i], h), i - one), None

    return lax.scan(body, (x, LAYERS - 1), None, LAYERS)[0][0]


def carried(following):
    """Scans over the weights; a layer reads a row of a table by a number that ``following`` changes."""

    def body(carry, weights):
        h, i = carry
        return (layer(weights, h @ jnp.asarray(TABLE)[i]), following(i)), None

    return lambda w, x: lax.scan(body, (x, jnp.int32(1)), w)[0][0]


def of_each_layer(change, numbers=None):
    """Scans over the weights and the numbers of layers; ``change`` reads something by the number."""

    def model(w, x):
        each = w, jnp.arange(LAYERS) if numbers is None else numbers
        return lax.scan(lambda h, each: (layer(each[0], change(h, each[1])), None), x, each)[0]

    return model


def drawn(i, *sizes):
    return jax.random.randint(jax.random.fold_in(jax.random.key(1), i), (2,), *sizes)


REFUSED = {
    "a column": lambda w, x: lax.fori_loop(0, WIDTH, lambda i, h: mpmd.mark_stage_end(h + w[0, :, i]), x),
    "two layers": lambda w, x: lax.fori_loop(
        0, LAYERS // 2, lambda i, h: layer(w[2 * i + 1], jnp.tanh(h @ w[2 * i])), x
    ),
    "a later range": over(jnp.arange(LAYERS) + 7, lambda w, i: w[i - 7]),
    "take": over(jnp.arange(LAYERS), lambda w, i: jnp.take(w, i, axis=0)),
    "counting down": counted_in_the_carry,
    "a layer under remat": lambda w, x: lax.fori_loop(
        0, LAYERS, jax.checkpoint(lambda i, h: layer(w[i], h)), x
    ),
    "another order": over(np.array([0, 2, 1, 3]), lambda w, i: w[i]),
    "a cast before": lambda w, x: lax.fori_loop(
        0, LAYERS, lambda i, h: layer(w.astype(jnp.bfloat16)[i].astype(jnp.float32), h), x
    ),
    "weights that change": lambda w, x: lax.fori_loop(
        0, LAYERS, lambda i, c: (c[0].at[i].multiply(0.5), layer(c[0][i], c[1])), (w, x)
    )[1],
    "rows that are written": lambda w, x: jnp.sum(
        lax.scan(
            lambda c, each: ((layer(each[0], c[0]), c[1].at[each[1]].set(c[0])), None),
            (x, jnp.zeros((LAYERS, *x.shape))),
            (w, jnp.arange(LAYERS)),
        )[0][1]
    ),
}

SERVED = {
    "rows that the data says": lambda w, x: lax.scan(
        lambda h, each: (layer(each, h + jnp.asarray(TABLE)[jnp.argmax(h[0])][0]), None), x, w
    )[0],
    "a rate of each layer": of_each_layer(lambda h, i: h * jnp.linspace(0, 1, LAYERS)[i]),
    "one of two tables": of_each_layer(lambda h, i: h @ jnp.asarray(TABLE)[:2][i % 2]),
    "a kind of each layer": of_each_layer(lambda h, i: h @ jnp.asarray(TABLE)[i], np.array([0, 1, 0, 1])),
    "rows that are drawn": of_each_layer(lambda h, i: h + jnp.asarray(TABLE)[drawn(i, 0, LAYERS), 0]),
    "a dilation in the carry": carried(lambda i: 2 * i),
    "a number that is set back": carried(lambda i: jnp.where(i < 2, i + 1, 0)),
    "a loop within a layer": lambda w, x: lax.scan(lambda h, each: (layer(each, smoothed(h)), None), x, w)[0],
}


def lowered(model):
    step = sgd_step(lambda w, x: jnp.mean(model(w, x) ** 2), mpmd.Std1F1B(LAYERS))
    return planned(step, W, jnp.ones((4, 2, WIDTH)), groups=LAYERS)


@pytest.mark.parametrize("model", REFUSED.values(), ids=REFUSED)
def test_loops_that_take_rows_by_a_counter_are_refused(model):
    with pytest.raises(mpmd.CompileError) as caught:
        lowered(model)
    for fault in caught.value.faults:
        assert fault.count("test_index_loops.py") == 2 and "takes rows of an array by its counter" in fault
        assert "jax.lax.scan(body, h, w)" in fault


@pytest.mark.parametrize("model", SERVED.values(), ids=SERVED)
def test_other_loops_are_not(model):
    assert len(lowered(model).plan.programs) == LAYERS
