"""A task that fails on the host is named, the state before it is still there, and what follows says why."""

import jax
import numpy as np
import pytest

import mpmd
from tests.support.models import batch, layer, mse, sgd_step, squares, weights
from tests.support.parity import assert_close
from tests.support.programs.table import by_index

train = sgd_step(mse, mpmd.Std1F1B(2))


class Explosion(ArithmeticError):
    pass


def explode_when(condition):
    """A function of an array and an index that fails on the host when the condition of the index holds."""

    def on_host(value, index):
        if condition(int(index)):
            raise Explosion("too hot")
        return np.asarray(value)

    def check(value, index=0):
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(value.shape, value.dtype), value, index)

    return check


def fails_in_forward(check):
    def loss(params, i, xs, ys):
        h = mpmd.mark_stage_end(layer(params[0], xs[i]))
        h = h + 0 * check(jax.lax.stop_gradient(h), i)
        return squares(layer(params[1], h), ys[i])

    return loss


def fails_in_backward(check):
    @jax.custom_vjp
    def through(h, i):
        return h

    through.defvjp(lambda h, i: (h, i), lambda i, g: (check(g, i), None))

    def loss(params, i, xs, ys):
        h = mpmd.mark_stage_end(through(layer(params[0], xs[i]), i))
        return squares(layer(params[1], h), ys[i])

    return loss


def fails_before_the_loop(check):
    return lambda state, xs, ys: train(state, check(xs), ys)


def fails_after_the_loop(check):
    def step(state, xs, ys):
        new, total = train(state, xs, ys)
        return [new[0], {**new[1], "w": check(new[1]["w"])}], total

    return step


FAILING = {
    "fwd_1__2 failed on group 1": lambda check: by_index(fails_in_forward(check)),
    "bwd_0__2 failed on group 0": lambda check: by_index(fails_in_backward(check)),
    r"before_\d failed on group 0": fails_before_the_loop,
    r"after_\d failed on group 1": fails_after_the_loop,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("said", "make"), FAILING.items(), ids=["forward", "backward", "before", "after"])
def test_a_failing_task_says_which_it_is(mesh, said, make):
    hot: list[int] = []  # the microbatches that fail; outside of the loop, 0 stands for all
    step = make(explode_when(lambda index: index in hot))
    compiled = mpmd.jit(step, mesh)
    state, total = compiled(weights(2), *batch())
    jax.block_until_ready(state)  # the loss is there before the rest
    hot.append(2 if "wd_" in said else 0)
    lost, total = compiled(state, *batch())
    with pytest.raises(mpmd.TaskError, match=f"(?s){said}.*too hot") as caught:
        jax.block_until_ready((lost, total))
    # Short, and without equations: a traceback of the callback has a line for each of its frames.
    assert caught.value.__cause__ is not None and len(str(caught.value).splitlines()) < 30
    hot.clear()
    with pytest.raises(RuntimeError, match="lost when an earlier step failed"):
        jax.block_until_ready(compiled(lost, *batch()))
    assert_close(compiled(state, *batch()), compiled(state, *batch()), 0)
