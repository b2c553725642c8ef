"""A train step on a chain of square layers, for benchmarks of what keeps its state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpmd

OPTIMIZER = optax.adamw(1e-3)


def train_step(num_stages: int, layers: int = 1) -> Callable:
    """A step with Std1F1B and ``OPTIMIZER``, with so many layers in each stage; see ``scheduled_step``."""
    return scheduled_step([layers] * num_stages, mpmd.Std1F1B(num_stages), OPTIMIZER)


def scheduled_step(
    layers: Sequence[int], schedule: mpmd.Schedule, optimizer: optax.GradientTransformation
) -> Callable:
    """A step on a chain.

    Args:
      layers: of each stage.

    Returns: a function of the state, a list of weights ``(width, width)`` and the state of ``optimizer``, and
      of ``xs`` and ``ys``, each ``(microbatches, rows, width)``, or with one column, which then stands for
      all. It returns the next state and the loss.
    """
    ends = {*itertools.accumulate(layers[:-1])}

    def loss_of(weights, x, y):
        for i, weight in enumerate(weights):
            x = jnp.tanh(as_wide(x, weight) @ weight)
            if i + 1 in ends:
                x = mpmd.mark_stage_end(x)
        return ((x - y) ** 2).mean()

    def step(state, xs, ys):
        weights, _ = state
        loss, gradients = mpmd.treduce(
            lambda batch: jax.value_and_grad(loss_of)(weights, *batch),
            (xs, ys),
            schedule=schedule,
            operation=mpmd.Add,
        )
        return updated(optimizer, state, gradients), loss

    return step


def as_wide(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Inputs with as many columns as a layer takes; one column stands for all."""
    return jnp.broadcast_to(x, (len(x), len(weight)))


def updated(optimizer: optax.GradientTransformation, state: Any, gradients: Any) -> Any:
    """The state after a step of the optimizer."""
    weights, optimizer_state = state
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, weights)
    return optax.apply_updates(weights, updates), optimizer_state
