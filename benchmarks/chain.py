"""A train step on a chain of square layers, for benchmarks whose subject is its state or its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpmd

OPTIMIZER = optax.adamw(1e-3)


def train_step(
    num_stages: int, layers: int = 1, optimizer: optax.GradientTransformation = OPTIMIZER
) -> Callable:
    """A step with 1F1B and ``layers`` layers on each stage.

    Returns: a function of the state, a list of weights ``(width, width)`` and the state of ``optimizer``, and
      of ``xs`` and ``ys``, each ``(microbatches, rows, width)``. It returns the next state and the loss.
    """

    def loss_of(weights, x, y):
        for i, weight in enumerate(weights, 1):
            x = jnp.tanh(x @ weight)
            if i % layers == 0 and i < len(weights):
                x = mpmd.mark_stage_end(x)
        return ((x - y) ** 2).mean()

    def step(state, xs, ys):
        loss, gradients = mpmd.treduce(
            lambda batch: jax.value_and_grad(loss_of)(state[0], *batch),
            (xs, ys),
            schedule=mpmd.Std1F1B(num_stages),
            operation=mpmd.Add,
        )
        return updated(optimizer, state, gradients), loss

    return step


def initial_state(num_layers: int, width: int, optimizer: optax.GradientTransformation = OPTIMIZER) -> Any:
    """The weights, and the state of the optimizer."""
    keys = jax.random.split(jax.random.key(0), num_layers)
    weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    return weights, optimizer.init(weights)


def batch(microbatches: int, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Normally distributed ``xs`` and ``ys`` of a step."""
    shape = (2, microbatches, rows, width)
    xs, ys = np.random.default_rng(0).standard_normal(shape, np.float32)
    return xs, ys


def updated(optimizer: optax.GradientTransformation, state: Any, gradients: Any) -> Any:
    """The state after a step of the optimizer."""
    weights, optimizer_state = state
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, weights)
    return optax.apply_updates(weights, updates), optimizer_state
