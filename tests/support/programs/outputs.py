"""What surrounds a loop: what it reads, what the step returns, and how the loop accumulates it."""

import jax
import jax.numpy as jnp

import mpmd
from tests.support.models import FromZeros, batch, descend, mlp, mse, squares, unmarked, weights
from tests.support.programs.table import Case, loop, program, trains


@program()
def a_result_used_twice_by_the_state():
    """Both copies are fed back: a target network that is set to the trained one."""

    def step(state, xs, ys):
        params, target = state

        def loss(params, x, y):
            return mse(params, x, y) + 0.1 * unmarked(target, x).mean()

        total, grads = trains(params, (xs, ys), loss)
        new = descend(params, grads)
        return (new, new), total

    return Case(step, (weights(3), weights(3)), batch())


@program()
def the_loss_alone():
    """Of a backward that nobody asks for nothing is left."""

    def step(state, params, xs, ys):
        return state, trains(params, (xs, ys))[0]

    def holds(loaded):
        assert "bwd" not in str(loaded.plan)

    return Case(step, (), (weights(3), *batch()), holds=holds)


def with_aux(loss, operation):
    """Trains on the first of what ``loss`` returns; ``operation`` accumulates the second."""

    def step(state, xs, ys):
        (total, aux), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(state, x, y),
            (xs, ys),
            operation=((mpmd.Add, operation), mpmd.Add),
        )
        return descend(state, grads), (total, aux, grads)

    return Case(step, weights(3), batch())


class Initial(FromZeros):
    """Never updates the state."""

    def update(self, state, update, index):
        return state


@program()
def a_state_that_is_never_updated():
    return with_aux(lambda params, x, y: (mse(params, x, y), jnp.sum(x)), Initial())


class Histogram:
    """A state of another shape and dtype than the values."""

    def state(self, n, a):
        return jnp.zeros(3, jnp.int32)

    def update(self, state, update, index):
        return state.at[jnp.clip(jnp.int32(update * 3), 0, 2)].add(1)


OPERATIONS = {
    "max of integers": (mpmd.Max, lambda h: jnp.argmax(h, -1)),
    "max of booleans": (mpmd.Max, lambda h: jnp.any(h > 0.9)),
    "histogram": (Histogram(), lambda h: jnp.max(h)),
}
"""Beside those that random programs have."""


@program(OPERATIONS)
def auxiliary_output_under(entry):
    operation, make = entry

    def loss(params, x, y):
        h = mlp(params, x)
        return squares(h, y), make(h)

    return with_aux(loss, operation)
