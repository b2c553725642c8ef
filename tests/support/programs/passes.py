"""Losses that pass a network several times: derivatives through its marks, calls that feed one another."""

import jax
import jax.numpy as jnp

import mpmd
from tests.support.models import CLIPPED_ADAM, descend, layer, mlp, mse, squares, weights
from tests.support.programs.scanned_layers import scanned, stacked
from tests.support.programs.stages import ON_ITS_OWN, homes
from tests.support.programs.table import program, train

THROUGH_MARKS = (
    r"derivatives through mark_stage_end: .*, such as \w+ at .*\.py.*, all runs in bwd_\d, on one group"
)


def stays_on_one_group_each(loaded):
    """Asserts that each weight is on the group of its stages alone: two arrays for each of three layers."""
    assert homes(loaded) == ON_ITS_OWN


def slope_of(score, x):
    """The norm of the gradient of each example's score."""
    slopes = jax.vmap(jax.grad(lambda row: score(row[None])[0]))(x)
    return jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-3)


def only_the_slope(params, x, y):
    """The model's value is dead code, its derivative is not."""
    return jnp.mean(jax.grad(lambda x: jnp.sum(mlp(params, x) * y))(x) ** 2)


def curvature(params, x, y):
    """A product with a Hessian: forward mode over reverse mode."""
    slope = jax.grad(lambda x: mse(params, x, y))
    return mse(params, x, y) + jnp.mean(jax.jvp(slope, (x,), (jnp.ones_like(x),))[1] ** 2)


def adversarial(params, x, y):
    """The second pass sees inputs that the first one's gradient has moved."""
    moved = jax.lax.stop_gradient(jnp.sign(jax.grad(lambda x: mse(params, x, y))(x)))
    return mse(params, x, y) + jnp.mean(0.1 * moved * mlp(params, x))


@program({f.__name__: f for f in (only_the_slope, curvature, adversarial)})
def derivative_through_marks(loss):
    return train(loss, weights(3), warns=THROUGH_MARKS)


def scanned_mlp(params, x):
    return scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), every=2), x, params["layers"])


@program()
def gradient_penalty_of_scanned_layers():
    def loss(params, x, y):
        def scores(x):
            return jnp.mean(scanned_mlp(params, x), -1)

        penalty = squares(slope_of(scores, 0.3 * x + 0.7 * y), 1)
        return scores(y).mean() - scores(x).mean() + 10 * penalty

    # Without clipping, these weights grow a hundredfold, and with them what rounding changes.
    return train(loss, stacked(), optimizer=CLIPPED_ADAM, warns=THROUGH_MARKS)


@program()
def an_inner_step_through_all_stages():
    """Meta-learning: all stages take a step on one half of a microbatch, and are judged on the other one."""

    def loss(params, x, y):
        adapted = descend(params, jax.grad(mse)(params, x[:2], y[:2]))
        return mse(adapted, x[2:], y[2:])

    schedule = mpmd.ListSchedule(num_stages=5, mpmd_dim=3, split_backward=False)
    return train(loss, weights(3), schedule=schedule, warns=THROUGH_MARKS)


def recycled(params, x, y):
    """The network reads what it has made of its input before."""
    return squares(mlp(params, x + 0.5 * mpmd.mark_stage_end(mlp(params, x))), y)


def estimated_by_itself(params, x, y):
    """Self-conditioning: no gradient through the first pass."""
    first = jax.lax.stop_gradient(mpmd.mark_stage_end(mlp(params, x)))
    return squares(mlp(params, x + first), y)


FEEDING = {
    "recycling": (recycled, mpmd.Interleaved1F1B(6, 3)),
    "recycling, zero bubble": (recycled, mpmd.InterleavedZeroBubble(6, 3)),
    "self-conditioning": (estimated_by_itself, mpmd.Interleaved1F1B(6, 3)),
}


@program(FEEDING)
def calls_that_feed_one_another(case):
    loss, schedule = case
    return train(loss, weights(3), schedule=schedule, optimizer=CLIPPED_ADAM, holds=stays_on_one_group_each)


@program()
def scanned_layers_that_are_recycled():
    def loss(params, x, y):
        return squares(scanned_mlp(params, x + scanned_mlp(params, x)), y)

    def holds(loaded):
        assert homes(loaded) == [(0,), (1,), (2,)] * 2

    return train(loss, stacked(), schedule=mpmd.Interleaved1F1B(6, 3), holds=holds)


@program()
def models_that_share_a_compiled_function():
    """The marks of all calls come from one trace of it."""
    apply = jax.jit(mlp)

    def loss(params, x, y):
        policy, reference = params
        mine, other = apply(policy, x), jax.lax.stop_gradient(apply(reference, x))
        return squares(mine, y) + 0.1 * squares(mine, other) + mse(reference, y, x)

    return train(loss, (weights(3), weights(3)[::-1]))
