"""Steps that do more than a loop and an update: before it, after it, and with what they close over."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from tests.support.models import WIDTH, batch, keys, layer, mse, weights
from tests.support.programs.table import Case, descend, program, trains


def without_marks(params, h):
    for p in params:
        h = layer(p, h)
    return h


@program()
def validation_after_the_update():
    """The whole model, without marks: its weights have to meet somewhere."""

    def step(state, xs, ys):
        total, grads = trains(state, (xs, ys))
        new = descend(state, grads)
        return new, (total, jnp.mean((without_marks(new, xs[0]) - ys[0]) ** 2))

    return Case(step, weights(3), batch())


@program()
def the_whole_model_before_the_loop():
    """Targets from an evaluation of the current weights."""

    def step(state, xs, ys):
        targets = ys + 0.1 * jax.lax.stop_gradient(without_marks(state, xs))
        total, grads = trains(state, (xs, targets))
        return descend(state, grads), total

    return Case(step, weights(3), batch())


@program()
def weights_of_all_stages_made_from_one_vector():
    """A hypernetwork, differentiated through by hand."""

    def step(state, xs, ys):
        def make(z):
            return [{"w": jnp.tanh(z @ h).reshape(WIDTH, WIDTH), "b": z[:WIDTH]} for h in projections]

        projections = [jax.random.normal(k, (6, WIDTH * WIDTH)) / 3 for k in keys(3)]
        params, back = jax.vjp(make, state)
        total, grads = trains(params, (xs, ys))
        return descend(state, back(grads)[0], 0.01), total

    return Case(step, jnp.linspace(-1, 1, 6), batch())


@program()
def a_scalar_of_the_weights_used_in_the_loop():
    def step(state, xs, ys):
        scale = 1 / (1 + optax.tree.norm(state))
        total, grads = trains(state, (xs, ys), lambda p, x, y: mse(p, x, y) * scale)
        return descend(state, grads), (total, scale)

    return Case(step, weights(3), batch())


@program()
def the_whole_step_under_jit():
    @partial(jax.jit, static_argnames="rate", donate_argnums=0)
    def inner(state, xs, ys, rate):
        total, grads = trains(state, (xs, ys))
        return descend(state, grads, rate), total

    return Case(lambda *args: inner(*args, rate=0.1), weights(3), batch())
