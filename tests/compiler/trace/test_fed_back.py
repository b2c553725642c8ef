"""Which results of a step are taken to be arguments of the next one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from tests.support.models import WIDTH, batch, descend, layer, squares, weights
from tests.support.parity import mesh_of

MICROBATCHES = 4


def train_step(params, xs, ys):
    """Returns what the last stage makes of each row, too: of the shape of the rows that it is given."""

    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        made = layer(params[1], h)
        return squares(made, y), made

    def one(mb):
        (value, made), grads = jax.value_and_grad(loss, has_aux=True)(params, *mb)
        return value, made, grads

    value, made, grads = mpmd.treduce(
        one,
        (xs, ys),
        schedule=mpmd.Std1F1B(2),
        operation=(mpmd.Add, mpmd.Concat(), mpmd.Add),
    )
    return descend(params, grads), made, value


def cut_in_the_step(params, xs, ys):
    params, made, value = train_step(params, *(mpmd.microbatches((x,), MICROBATCHES)[0] for x in (xs, ys)))
    return params, made.reshape(xs.shape), value


STEPS = {
    "cut before": (train_step, lambda x: x),
    "cut in the step": (cut_in_the_step, lambda x: x.reshape(-1, WIDTH)),
}


@pytest.mark.usual("True-cut before", "True-cut in the step", "False-cut before")
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("donated", [False, True])
def test_what_is_made_of_each_row_is_no_next_batch(name, donated):
    """Otherwise the last group would send it to the first one in each step, and mpmd.check feed it back."""
    step, shaped = STEPS[name]
    xs, ys = map(shaped, batch(MICROBATCHES))
    params = weights(2)
    with mesh_of(2) as mesh:
        compiled = mpmd.jit(step, mesh, donate_argnums=1 if donated else ())
        loaded = compiled.compile(params, xs, ys)
        number = len(jax.tree.leaves(params))
        state = [(i, i) for i in range(number)]
        rows = [(number, number)] if donated else []
        assert list(loaded.compiled.step.fed_back_leaves) == state + rows
        _, made, _ = compiled(params, xs + 0, ys)
        assert donated or made.mpmd_idxs == (1,), "it stays where it is made"
        np.testing.assert_allclose(made, jax.jit(step)(params, xs, ys)[1], rtol=1e-5, atol=1e-6)


def test_what_a_step_also_returns_or_reads_whole_is_no_batch():
    def step(params, xs, ys):
        params, made, value = train_step(params, xs - jnp.mean(xs), ys)
        return params, made + xs, value

    with mesh_of(2) as mesh:
        loaded = mpmd.jit(step, mesh).compile(weights(2), *batch(MICROBATCHES))
    number = len(jax.tree.leaves(weights(2)))
    assert (number, number) in loaded.compiled.step.fed_back_leaves
