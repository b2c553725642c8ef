"""A train step on a chain of square layers, for benchmarks of what keeps its state."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import mpmd

OPTIMIZER = optax.adamw(1e-3)


def train_step(num_stages: int, layers: int = 1) -> Callable:
    """A step with Std1F1B and AdamW.

    Args:
      layers: so many in each stage.

    Returns: a function of the state, a list of weights ``(width, width)`` and the state of ``OPTIMIZER``, and
      of ``xs`` and ``ys``, each ``(microbatches, rows, width)``. It returns the next state and the loss.
    """

    def loss_of(weights, x, y):
        for i, weight in enumerate(weights):
            x = jnp.tanh(x @ weight)
            if (i + 1) % layers == 0 and i < len(weights) - 1:
                x = mpmd.mark_stage_end(x)
        return ((x - y) ** 2).mean()

    def step(state, xs, ys):
        weights, optimizer_state = state
        loss, gradients = mpmd.treduce(
            lambda batch: jax.value_and_grad(loss_of)(weights, *batch),
            (xs, ys),
            schedule=mpmd.Std1F1B(num_stages),
            operation=mpmd.Add,
        )
        updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, weights)
        return (optax.apply_updates(weights, updates), optimizer_state), loss

    return step
