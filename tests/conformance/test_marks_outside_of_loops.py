"""Marks outside of ``treduce`` are the identity in steps with loops, too; one warning names their lines."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.models import batch, layer, mse, sgd_step, stack, weights
from tests.support.parity import assert_close, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")


train = sgd_step(mse, mpmd.Std1F1B(2))


def after_the_update(state, xs, ys):
    state, total = train(state, xs, ys)
    return state, (total, mse(state, xs[0], ys[0]))


def in_a_scan(state, xs, ys):
    state, _ = train(state, xs, ys)

    def body(h, p):
        return mpmd.mark_stage_end(layer(p, h), num_stages=2), None

    return state, jax.lax.scan(body, xs[0], stack(state))[0]


def in_a_while_loop(state, xs, ys):
    def body(carry):
        state, _ = carry
        return jax.tree.map(lambda p: 0.5 * p, state), mse(state, xs[0], ys[0])

    new, total = train(state, xs, ys)
    return new, jax.lax.while_loop(lambda carry: carry[1] > 2.0, body, (state, jnp.float32(1e9)))[1], total


def differentiated_and_rematerialised(state, xs, ys):
    new, _ = train(state, xs, ys)
    return new, jax.grad(jax.checkpoint(lambda p: mse(p, xs[0], ys[0])))(new)


@jax.custom_vjp
def doubled(h):
    return 2 * h


doubled.defvjp(lambda h: (mpmd.mark_stage_end(2 * h), None), lambda _, g: (mpmd.mark_stage_end(2 * g),))


def in_jit_and_custom_vjp(state, xs, ys):
    new, _ = train(state, xs, ys)
    return new, jax.grad(lambda x: jnp.sum(jax.jit(doubled)(x) ** 2))(xs[0])


PROGRAMS = [
    after_the_update,
    in_a_scan,
    in_a_while_loop,
    differentiated_and_rematerialised,
    in_jit_and_custom_vjp,
]


def called(step, *args):
    """The results of a step, and the texts of its warnings of marks."""
    with mesh_of(2) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jitted = mpmd.jit(step, mesh)
        results = mpmd.to_host(jitted(*args))
        jitted(*args)
    of_marks = [warning for warning in caught if "mark_stage_end at" in str(warning.message)]
    assert {warning.category for warning in of_marks} <= {mpmd.PerformanceWarning}
    return results, [str(warning.message) for warning in of_marks]


@pytest.mark.parametrize("step", PROGRAMS, ids=lambda step: step.__name__)
def test_marks_outside_of_loops(step):
    args = weights(2), *batch()
    results, texts = called(step, *args)
    assert_close(results, jax.jit(step)(*args))
    assert len(texts) == 1
    where = r"mark_stage_end at \S+\.py:\d+ .*outside of any treduce: no stage ends there"
    assert re.search(f"{where}.*as is right for a loss that an optimizer evaluates", texts[0])


def test_a_step_that_is_traced_for_its_types_again_warns_once():
    def step(scale, params, xs, ys):
        params, _ = train(params, xs, ys)
        return scale * 1.5 + 0 * mse(params, xs[0], ys[0]), params

    assert len(called(step, 1.0, weights(2), *batch())[1]) == 1
