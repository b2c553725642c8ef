"""Groups of two processes against groups of one, with as many devices, in turns; and plain ``jax.jit``.

A step of gradient descent on two stages, data-parallel over the two devices of each group. What differs is
how the devices of a group meet, in memory or over TCP, and how many processes exchange parts of activations.

Then activations between two groups of two processes: the first group has the rows, and the second one reads
the columns, or all of it in each process.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
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
GROUPS = ({"rows": 2, "columns": 2}, {"rows": 1, "columns": 2})
"""Of two processes each: of the first group, each has half of the rows, and of the second, of the columns."""
READERS = {"columns": P(None, "rows", "columns"), "all": P(None, "rows")}
TRANSPORTS = ("shared_memory", "network")
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


def forward(weights: Any, xs: Any) -> Any:
    """Sends each activation once, of which little is read, and does little else."""

    def loss(x):
        h = mpmd.mark_stage_end(x * weights[0])
        return jnp.mean(h[:1] * weights[1])

    return mpmd.treduce(loss, xs, schedule=mpmd.ForwardOnly(2, 2), operation=mpmd.Add)


def run(conditions: Conditions) -> Result:
    steps, of_steps = _measure_steps(conditions)
    resharding, of_resharding = _measure_resharding(conditions)
    return Result([steps, resharding], [], {"steps": of_steps, "resharding": of_resharding})


def _measure_steps(conditions: Conditions) -> tuple[Table, list[dict]]:
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
    return Table("Groups of several processes", header, rows), data


def _measure_resharding(conditions: Conditions) -> tuple[Table, list[dict]]:
    size = QUICK[-1] if conditions.quick else SIZES[-1]
    # An array of its own for each step: groups keep it as the first step that reads it has it sharded.
    arguments = {name: jax.tree.map(jnp.asarray, _arguments(size)) for name in READERS}
    rows, data = [], []
    for transport in TRANSPORTS:
        with cluster.launch(
            groups=GROUPS,
            processes_per_group=2,
            cpus_per_group=0.1,
            transport=transport,
            timeout=START_SECONDS,
        ) as mesh:
            steps = {
                name: mpmd.jit(forward, mesh, in_shardings=(P(), spec)).compile(*arguments[name])
                for name, spec in READERS.items()
            }
            calls = {
                name: functools.partial(_value_of, step, *arguments[name]) for name, step in steps.items()
            }
            for call in calls.values():
                call()
            times = interleaved(
                {name: functools.partial(seconds_of, call) for name, call in calls.items()},
                max(5, conditions.effort.repetitions),
            )
        for name, step in steps.items():
            group = step.report().groups[0]
            busiest = max(group.process_sent_bytes)
            rows.append(
                (
                    f"{transport}: rows to {name}",
                    f"{group.sent_bytes / MICROBATCHES / 2**20:.1f}",
                    f"{busiest / MICROBATCHES / 2**20:.1f}",
                    f"{statistics.median(times[name]) * 1e3 / MICROBATCHES:.1f}",
                    f"{ratio(times[name], times['all']):.2f}",
                )
            )
            data.append(
                {
                    "transport": transport,
                    "readers": name,
                    "size": size,
                    "sent_bytes": group.process_sent_bytes,
                    "seconds": times[name],
                }
            )
    activation = f"an activation of {size[0] * size[1] * 4 / 2**20:g} MiB, 2 x 2 processes"
    header = (activation, "MiB sent", "by the busiest", "ms", "to all")
    return Table("Resharding between groups", header, tuple(rows)), data


def _value_of(step: Any, weights: Any, xs: Any) -> float:
    return float(step(weights, xs))


def _arguments(size: tuple[int, int]) -> tuple[list[np.ndarray], np.ndarray]:
    numbers = np.random.default_rng(0)
    weights = [numbers.standard_normal(size[1], "float32") for _ in range(2)]
    return weights, numbers.standard_normal((MICROBATCHES, *size), "float32")


def _on(mesh: cluster.ClusterMesh, size: tuple[int, int]) -> Callable[[], object]:
    step = mpmd.jit(train_step, mesh, in_shardings=(P(), P(None, "data")))
    weights, xs = jax.tree.map(jnp.asarray, _arguments(size))  # groups keep jax arrays that they were sent
    return lambda: float(step(weights, xs)[1])


def _plain(size: tuple[int, int]) -> Callable[[], object]:
    step = jax.jit(train_step)
    weights, xs = jax.tree.map(jnp.asarray, _arguments(size))
    return lambda: float(step(weights, xs)[1])
