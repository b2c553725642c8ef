"""A model of one small matrix per stage: all that is left of a step is the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray

import cluster
import mpmd
from benchmarks.peers.ours import START_SECONDS

WIDTH = 8


def train_step(groups: int):
    """Gradient descent; the step is called with ``params`` and ``xs`` of ``arguments``."""
    schedule = mpmd.Std1F1B(groups)

    def loss_fn(params, x):
        for weight in params[:-1]:
            x = mpmd.mark_stage_end(jnp.tanh(x @ weight))
        return jnp.mean((x @ params[-1]) ** 2)

    return _descent(loss_fn, schedule)


def _descent(loss_fn: Callable, schedule: mpmd.Schedule):
    def step(params, xs):
        loss, gradients = mpmd.treduce(
            lambda x: jax.value_and_grad(loss_fn)(params, x), xs, schedule=schedule, operation=mpmd.Add
        )
        return jax.tree.map(lambda weight, gradient: weight - 0.01 * gradient, params, gradients), loss

    return step


def sliced_train_step(groups: int, slices: int):
    """The same with rows as tokens of a sequence: a stage hands what it made to the stage's next slice."""
    schedule = mpmd.Seq1F1B(groups, slices)

    def loss_fn(params, x):
        carried, total = [jnp.zeros(())] * groups, 0.0
        for piece in mpmd.slices(x, mpmd.slice_bounds(len(x), slices), axis=0):
            h = piece
            for stage, weight in enumerate(params):
                h = carried[stage] = jnp.tanh(h @ weight + carried[stage])
                if stage < groups - 1:
                    h = mpmd.mark_stage_end(h)
            total += jnp.sum(h**2)
        return total

    return _descent(loss_fn, schedule)


def arguments(groups: int, microbatches: int, batch: int) -> tuple[list[np.ndarray], np.ndarray]:
    """A matrix for each group, and float32[microbatches, batch / microbatches, WIDTH]."""
    numbers = np.random.default_rng(0)
    params = [numbers.standard_normal((WIDTH, WIDTH), "float32") for _ in range(groups)]
    return params, numbers.standard_normal((microbatches, batch // microbatches, WIDTH), "float32")


def in_process_mesh(groups: int) -> mpmd.MpmdMesh:
    """Over fake devices."""
    return mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:groups]), ("stage",)), "stage")


def open_mesh(groups: int, ray_address: str, **of_ray: Any) -> mpmd.MpmdMesh | cluster.ClusterMesh:
    """Over fake devices, or where there is an address of actors; ``of_ray`` is what ``ray.init`` takes."""
    if not ray_address:
        return in_process_mesh(groups)
    ray.init(address=ray_address, log_to_driver=False, **of_ray)
    return cluster.launch({"stage": groups}, "stage", timeout=START_SECONDS)
