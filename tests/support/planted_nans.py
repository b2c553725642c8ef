"""Train steps with a NaN in them: the line that makes it is marked in this file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

WIDTH, ROWS, MICROBATCHES = 4, 8, 2


class Planted(NamedTuple):
    """A step with its arguments.

    Attributes:
      devices: the devices of each group, along the axis ``data``.
    """

    step: Callable
    args: tuple[Any, ...]
    devices: int = 1
    in_specs: Any = None


def line_of(name: str) -> int:
    """The number of the line that is marked with a name."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# planted: {name}"))
    return number


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, WIDTH)).astype(np.float32), np.ones((ROWS, WIDTH), np.float32)


def weights(count: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 2 for _ in range(count)]


def squared(h, y):
    return ((h - y) ** 2).mean()


def descend(p, g):
    return p - 0.1 * g


def train_step(loss_fn, update=descend):
    def step(params, x, y):
        loss, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss_fn)(params, *mb),
            mpmd.microbatches((x, y), MICROBATCHES),
            schedule=mpmd.Std1F1B(2),
            operation=mpmd.Mean,
        )
        return jax.tree.map(update, params, grads), loss

    return step


def two_stages(first, second=lambda h, w: jnp.tanh(h @ w), loss=squared):
    def loss_fn(params, x, y):
        h = mpmd.mark_stage_end(first(x, params[0]))
        return loss(second(h, params[1]), y)

    return train_step(loss_fn)


def scan_over_layers() -> Planted:
    def layer(h, p):
        h = jnp.tanh(h @ p["w"])
        return h * jnp.sqrt(p["t"])  # planted: scan_over_layers

    def loss_fn(params, x, y):
        def body(h, p):
            return mpmd.mark_stage_end(layer(h, p), num_stages=2), None

        return squared(jax.lax.scan(body, x, params)[0], y)

    times = np.ones((6, WIDTH), np.float32)
    times[4, 2] = -1.0
    return Planted(train_step(loss_fn), ({"w": np.stack(weights(6)), "t": times}, *batch()))


def custom_derivative() -> Planted:
    @jax.custom_vjp
    def layer(h, w):
        return jnp.tanh(h @ w)

    def forward(h, w):
        return layer(h, w), (h, w)

    def backward(kept, g):
        h, w = kept
        scale = jnp.sqrt(jnp.sum(g) - 1e9)  # planted: custom_derivative
        return g @ w.T * scale, h.T @ g

    layer.defvjp(forward, backward)
    return Planted(two_stages(lambda x, w: x @ w, layer), (weights(), *batch()))


def sharded_group() -> Planted:
    def layer(h, w):
        h = jax.nn.relu(h @ w)
        return jnp.log(h - 0.5)  # planted: sharded_group

    spec = jax.sharding.PartitionSpec("data")
    return Planted(two_stages(layer), (weights(), *batch()), devices=2, in_specs=(None, spec, spec))


def optimizer() -> Planted:
    def update(p, g):
        variance = jnp.maximum(g * g - 1e9, 0.0)
        direction = (g - g) / jnp.sqrt(variance)  # planted: optimizer
        return p - 0.1 * direction

    def loss_fn(params, x, y):
        return squared(mpmd.mark_stage_end(x @ params[0]) @ params[1], y)

    return Planted(train_step(loss_fn, update), (weights(), *batch()))


PROGRAMS = {
    program.__name__: program
    for program in (
        scan_over_layers,
        custom_derivative,
        sharded_group,
        optimizer,
    )
}


def run(planted: Planted, capture: Path) -> None:
    """Runs a step with NaNs refused. Raises ``NonFiniteError``."""
    sizes = (2, planted.devices)
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    mesh = mpmd.MpmdMesh(
        jax.make_mesh(sizes, ("stage", "data"), axis_types=axis_types), "stage", capture=capture
    )
    with mesh, jax.debug_nans(True):
        step = mpmd.jit(planted.step, mesh, donate_argnums=0, in_specs=planted.in_specs)
        _, loss = step(*planted.args)
        float(loss)
        raise AssertionError("the NaN was not noticed")
