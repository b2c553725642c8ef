"""Groups of two processes against groups of one, with as many devices, in turns; and plain ``jax.jit``.

A step of gradient descent on two stages, data-parallel over the two devices of each group. What differs is
how the devices of a group meet, in memory or over TCP, and how many processes exchange parts of activations.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import cluster
import mpmd
from benchmarks.measure import Conditions, Result, Table, interleaved, ratio, seconds_of
from benchmarks.peers.ours import START_SECONDS

MICROBATCHES = 4
SIZES = ((128, 64), (512, 1024), (2048, 2048))
"""Rows and columns of an activation of float32: 32 KiB, 2 MiB and 16 MiB."""
QUICK = SIZES[:2]
SHAPE = {"stage": 2, "data": 2}
ONE, TWO, JIT = "one process", "two processes", "jax.jit, one device"


def train_step(weights: Any, xs: Any) -> Any:
    """Elementwise stages, so that the step is little else than messages and collectives."""

    def loss(weights, x):
        h = mpmd.mark_stage_end(jnp.tanh(x * weights[0]))
        return jnp.mean((h * weights[1]) ** 2)

    total, gradients = mpmd.treduce(
        lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule=mpmd.Std1F1B(2), operation=mpmd.Add
    )
    return jax.tree.map(lambda weight, gradient: weight - 0.01 * gradient, weights, gradients), total


def run(conditions: Conditions) -> Result:
    with contextlib.ExitStack() as open_meshes:
        meshes = {
            name: open_meshes.enter_context(
                cluster.launch(
                    SHAPE, "stage", processes_per_group=count, cpus_per_group=0.1, timeout=START_SECONDS
                )
            )
            for name, count in ((ONE, 1), (TWO, 2))
        }
        found = {}
        for size in QUICK if conditions.quick else SIZES:
            steps = {name: _on(mesh, size) for name, mesh in meshes.items()} | {JIT: _plain(size)}
            for step in steps.values():
                step()  # the first one compiles
            times = interleaved(
                {name: functools.partial(seconds_of, step) for name, step in steps.items()},
                max(5, conditions.effort.repetitions),
            )
            found[size] = times
    rows = tuple(
        (
            f"{rows * columns * 4 / 2**20:g} MiB",
            *(f"{sorted(times[name])[len(times[name]) // 2] * 1e3:.1f}" for name in (ONE, TWO, JIT)),
            f"{ratio(times[TWO], times[ONE]):.2f}",
        )
        for (rows, columns), times in found.items()
    )
    header = ("ms of a step, by activation", ONE, TWO, JIT, "two / one")
    data = [{"rows": size[0], "columns": size[1], "seconds": times} for size, times in found.items()]
    return Result([Table("Groups of several processes", header, rows)], [], data)


def _arguments(size: tuple[int, int]) -> tuple[list[np.ndarray], np.ndarray]:
    numbers = np.random.default_rng(0)
    weights = [numbers.standard_normal(size[1], "float32") for _ in range(2)]
    return weights, numbers.standard_normal((MICROBATCHES, *size), "float32")


def _on(mesh: cluster.ClusterMesh, size: tuple[int, int]) -> Callable[[], object]:
    step = mpmd.mpmd_jit_with_loop(train_step, mesh, in_specs=(P(), P(None, "data")))
    weights, xs = jax.tree.map(jnp.asarray, _arguments(size))  # groups keep jax arrays that they were sent
    return lambda: float(step(weights, xs)[1])


def _plain(size: tuple[int, int]) -> Callable[[], object]:
    step = jax.jit(train_step)
    weights, xs = jax.tree.map(jnp.asarray, _arguments(size))
    return lambda: float(step(weights, xs)[1])
