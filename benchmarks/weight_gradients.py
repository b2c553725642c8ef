"""Gradients of weights as JAX writes them, and as steps compute them.

    python -m benchmarks.weight_gradients

A layer multiplies activations ``(rows, positions, inputs)`` by weights ``(inputs, outputs)``. Its gradient is
added to an accumulator. Both ways take turns on one device of this process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from benchmarks.measure import Table
from mpmd.compiler.jaxprs.canonical import canonical

SHAPES = [
    (8, 128, 256, 1024),
    (8, 128, 1024, 256),
    (4, 512, 512, 512),
    (4, 512, 512, 2048),
    (8, 256, 128, 4096),
    (16, 64, 128, 16_384),
]
"""The rows, the positions, the inputs and the outputs."""

REPETITIONS = 20


def main() -> None:
    """Prints the milliseconds of both, and their ratio."""
    rows = [_row(shape, dtype) for dtype in ("float32", "bfloat16") for shape in SHAPES]
    header = ("rows, positions, inputs, outputs", "dtype", "ms, as JAX", "ms, as steps", "ratio")
    print(Table("Gradients of weights", header, rows))


def _row(shape: tuple[int, ...], dtype: str) -> tuple[str, ...]:
    rows, positions, inputs, outputs = shape
    random = np.random.default_rng(0)
    shapes = (inputs, outputs), (inputs, outputs), (rows, positions, inputs), (rows, positions, outputs)
    args = [jnp.asarray(random.standard_normal(of_one, np.float32), dtype) for of_one in shapes]
    jaxpr, _ = canonical(jax.make_jaxpr(_accumulated)(*args))
    ways = [jax.jit(_accumulated), jax.jit(jaxpr_as_fun(ClosedJaxpr(jaxpr, ())))]
    for way in ways:
        jax.block_until_ready(way(*args))
    turns = [[_seconds(way, args) for way in ways] for _ in range(REPETITIONS)]
    as_jax, as_steps = (statistics.median(turn[i] for turn in turns) * 1e3 for i in range(2))
    ratio = statistics.median(turn[0] / turn[1] for turn in turns)
    return ", ".join(map(str, shape)), dtype, f"{as_jax:.2f}", f"{as_steps:.2f}", f"{ratio:.2f}"


def _accumulated(sum_so_far: jax.Array, weights: jax.Array, x: jax.Array, gradient: jax.Array) -> jax.Array:
    """The sum with the gradient of ``weights``, given that of their product with ``x``."""
    (of_weights,) = jax.vjp(lambda weights: x @ weights, weights)[1](gradient)
    return sum_so_far + of_weights


def _seconds(way: Callable[..., object], args: list[jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(way(*args))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
