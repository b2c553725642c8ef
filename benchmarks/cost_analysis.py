"""XLA's costs of compiled stages, beside their times: ``python -m benchmarks.cost_analysis``.

Forward and backward of several stages, on one device of this process. ``Compiled.cost_analysis()`` has
operations and bytes of what XLA has made of a stage; the plan's work has those of its equations. Both are
turned into seconds by the same devices, which were calibrated just before, and compared with the time of the
compiled stage. What it takes to know that time is the time to compile, which XLA's numbers need, too, and the
time to run it.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mpmd
from benchmarks.measure import Table, seconds_of
from mpmd.planner.trials.device_work import device_work
from mpmd.planner.trials.timing import repeat_together

WIDTH, ROWS, HEADS, LAYERS, SECONDS = 512, 1024, 8, 4, 0.5


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of ``LAYERS`` layers.

    Attributes:
      function: of the stage's weights and of what enters it, ``(ROWS, WIDTH)``.
      weights: the shapes of one layer's.
    """

    name: str
    function: Callable[[Any, jax.Array], jax.Array]
    weights: tuple[tuple[int, ...], ...]

    def backward(self, weights: Any, x: jax.Array) -> Any:
        """The gradients that a pipeline computes: those of weights and of the input."""
        return jax.grad(lambda *args: (self.function(*args) ** 2).sum(), argnums=(0, 1))(weights, x)


def main() -> None:
    """Prints XLA's numbers, ours and the times."""
    cluster = mpmd.Cluster.of_this_process(jax.devices()[:1], measure=True)
    rows = [_row(stage, cluster) for stage in STAGES]
    header = (
        "forward and backward of",
        "operations, XLA / plan",
        "bytes, XLA / plan",
        "ms measured",
        "by XLA's cost, ratio",
        "by the plan's work, ratio",
        "ms to compile",
        "ms to time",
    )
    print(Table("XLA's cost analysis", header, tuple(rows)))


def _row(stage: Stage, cluster: mpmd.Cluster) -> tuple[str, ...]:
    keys = iter(jax.random.split(jax.random.key(0), 1 + LAYERS * len(stage.weights)))
    weights = [
        [jax.random.normal(next(keys), s) * s[0] ** -0.5 for s in stage.weights] for _ in range(LAYERS)
    ]
    if stage.name == SCANNED:
        weights = [jnp.stack(of_layers) for of_layers in zip(*weights, strict=True)]
    x = jax.random.normal(next(keys), (ROWS, WIDTH))
    start = time.perf_counter()
    compiled = jax.jit(stage.backward).lower(weights, x).compile()
    compiling = time.perf_counter() - start
    start = time.perf_counter()
    run = functools.partial(seconds_of, lambda: jax.block_until_ready(compiled(weights, x)))
    taken = statistics.median(*repeat_together([run], SECONDS))
    timing = time.perf_counter() - start
    analysis = compiled.cost_analysis()
    jaxpr = jax.make_jaxpr(stage.backward)(weights, x).jaxpr
    work = device_work(jaxpr, [((),) * len(var.aval.shape) for var in jaxpr.invars], {})
    by_xla = cluster.seconds(analysis["flops"], analysis["bytes accessed"], 0.0)
    by_plan = cluster.seconds(work.operations, work.nbytes - work.nbytes_beside, work.nbytes_beside)
    return (
        stage.name,
        f"{analysis['flops'] / work.operations:.2f}",
        f"{analysis['bytes accessed'] / work.nbytes:.2f}",
        f"{taken * 1e3:.1f}",
        f"{by_xla / taken:.2f}",
        f"{by_plan / taken:.2f}",
        f"{compiling * 1e3:.0f}",
        f"{timing * 1e3:.0f}",
    )


# Stages.


def _layer(weights: Any, x: jax.Array) -> jax.Array:
    up, down = weights
    return x + jax.nn.gelu(x @ up) @ down


def _attention(weights: Any, x: jax.Array) -> jax.Array:
    into, out = weights
    q, k, v = jnp.moveaxis((x @ into).reshape(ROWS, 3, HEADS, -1), 1, 0)
    made = jax.nn.dot_product_attention(q[None], k[None], v[None])[0]
    return x + made.reshape(ROWS, WIDTH) @ out


def _orthogonal(weights: Any, x: jax.Array) -> jax.Array:
    """A layer whose weights are a triangular factor, which a kernel of LAPACK computes."""
    (matrix,) = weights
    factor = jnp.linalg.cholesky(matrix @ matrix.T + WIDTH * jnp.eye(WIDTH))
    return x + jnp.tanh(x @ factor)


def _in_a_row(layer: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, jax.Array], jax.Array]:
    def stage(weights: Any, x: jax.Array) -> jax.Array:
        for of_layer in weights:
            x = layer(of_layer, x)
        return x

    return stage


def _scanned(weights: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, of_layer: (_layer(of_layer, x), None), x, weights)[0]


MLP, ATTENTION = ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)), ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH))
SCANNED = f"{LAYERS} MLPs, scanned"
STAGES = (
    Stage(f"{LAYERS} MLPs", _in_a_row(_layer), MLP),
    Stage(SCANNED, _scanned, MLP),
    Stage(f"{LAYERS} layers of attention", _in_a_row(_attention), ATTENTION),
    Stage(f"{LAYERS} layers with a kernel of LAPACK", _in_a_row(_orthogonal), ((WIDTH, WIDTH),)),
)


if __name__ == "__main__":
    main()
