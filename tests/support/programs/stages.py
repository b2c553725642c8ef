"""How a model is cut into stages, and what crosses from one to the next."""

import jax
import jax.numpy as jnp

import mpmd
from tests.support.models import BATCH, MICROBATCHES, WIDTH, batch, keys, layer, mlp, mse, weights
from tests.support.programs.table import program, train

ACTIVATION = BATCH * WIDTH * 4
"""Bytes of what one microbatch sends from a stage to the next, or back."""


ON_ITS_OWN = [(0,), (0,), (1,), (1,), (2,), (2,)]
"""The groups of a bias and a weight of each of three stages."""


def homes(loaded, prefix="args[0][0]"):
    """The groups that hold each leaf of an argument whose path begins with the prefix."""
    return [leaf.mpmd_idxs for leaf in loaded.plan.inputs if leaf.path.startswith(prefix)]


def sends_nothing_but_activations(loaded):
    """Forward and backward over each edge, once a microbatch; the plan has no other traffic."""
    stages = len(loaded.plan.programs)
    neighbours = [(i > 0) + (i < stages - 1) for i in range(stages)]
    sent = [group.sent_bytes for group in loaded.report().groups]
    expected = [count * MICROBATCHES * ACTIVATION for count in neighbours]
    assert sent == expected, f"sends {sent} bytes, not {expected}"


@program(
    {s.name: s for s in (mpmd.GPipe(3), mpmd.Std1F1B(3), mpmd.Eager1F1B(3))},
)
def mlp_under_a_schedule(schedule):
    return train(mse, weights(3), schedule=schedule, holds=sends_nothing_but_activations)


@program({str(frozen): frozen for frozen in [(0,), (1,), (1, 2)]})
def frozen_stages(frozen):
    def loss(params, x, y):
        parts = [jax.lax.stop_gradient(p) if i in frozen else p for i, p in enumerate(params)]
        return mse(parts, x, y)

    def holds(loaded):
        assert homes(loaded) == ON_ITS_OWN
        sent = sum(group.sent_bytes for group in loaded.report().groups)
        trained = [i for i in range(3) if i not in frozen]
        boundaries = 2 + 2 - min(trained)  # forward over both; backward as far as something is trained
        assert sent == boundaries * MICROBATCHES * ACTIVATION, f"sends {sent} bytes"

    return train(loss, weights(3), holds=holds)


@program()
def penalties_on_all_weights():
    def loss(params, x, y):
        leaves = jax.tree.leaves(params)
        l2 = sum(jnp.vdot(w, w) for w in leaves)
        l1 = sum(jnp.sum(jnp.abs(w)) for w in leaves)
        return mse(params, x, y) + 0.01 * l2 + 0.001 * l1

    def holds(loaded):
        assert homes(loaded) == ON_ITS_OWN

    return train(loss, weights(3), holds=holds)


@program()
def masks_and_positions_of_the_microbatch():
    """Made from integers of the batch: every group has these and makes its own."""

    def loss(params, x, y):
        tokens, y = y
        mask = (tokens > 1)[:, None]
        positions = jnp.cumsum(tokens > 0, -1)[:, None] / BATCH
        h = mlp(params, x, lambda p, h: jnp.where(mask, layer(p, h + positions), h))
        return jnp.sum(jnp.mean((h - y) ** 2, -1) * (tokens > 0))

    xs, ys = batch()
    tokens = jax.random.randint(keys(1)[0], (MICROBATCHES, BATCH), 0, 4)
    return train(loss, weights(3), data=(xs, (tokens, ys)), holds=sends_nothing_but_activations)
