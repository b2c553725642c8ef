"""The cost of recording: steps with and without it, in turns, in one process and on Ray.

    python -m benchmarks.profiling [--ray] [--rounds 30]

Prints the ratio of the medians for a step of tiny tasks, where recording shows most, and for one of larger
tasks. The seconds are those from the call until all groups have replied.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray

import cluster
import mpmd

STAGES, MICROBATCHES, ROWS = 2, 8, 64
WIDTHS = {"tiny tasks": 16, "larger tasks": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ray", action="store_true", help="Ray actors instead of one process")
    parser.add_argument("--rounds", type=int, default=30, help="of a step of each kind (default: 30)")
    args = parser.parse_args()
    with groups(args.ray) as mesh:
        for name, width in WIDTHS.items():
            plain, recorded = medians(mesh, width, args.rounds)
            print(
                f"{name}: {1e3 * plain:.2f} ms a step, {1e3 * recorded:.2f} ms recorded, ratio "
                f"{recorded / plain:.2f}"
            )


@contextlib.contextmanager
def groups(on_ray: bool) -> Iterator[Any]:
    """A mesh of two groups of one device."""
    if not on_ray:
        jax.config.update("jax_num_cpu_devices", STAGES)
        with mpmd.MpmdMesh(jax.make_mesh((STAGES,), ("stage",)), "stage") as mesh:
            yield mesh
        return
    ray.init(address="local", num_cpus=STAGES, include_dashboard=False, log_to_driver=False)
    try:
        with cluster.launch({"stage": STAGES}, "stage") as mesh:
            yield mesh
    finally:
        ray.shutdown()


def medians(mesh: Any, width: int, rounds: int) -> tuple[float, float]:
    """The median seconds of a step without and with recording."""
    params = [np.eye(width, dtype="float32")] * STAGES
    xs = np.ones((MICROBATCHES, ROWS, width), "float32")
    step = mpmd.jit(train_step, mesh, donate_argnums=0).compile(params, xs)
    state, plain, recorded = step(params, xs)[0], list[float](), list[float]()
    for number in range(2 * rounds):
        if (number + number // 2) % 2:  # neither is always the first of a pair
            profile = step.profile(state, xs)
            state = profile.result[0]
            recorded.append(profile.steps[0].returned / 1e9)
        else:
            start = time.perf_counter()
            state = jax.block_until_ready(step(state, xs))[0]
            plain.append(time.perf_counter() - start)
    return statistics.median(plain), statistics.median(recorded)


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for number, weight in enumerate(params):
        x = jnp.tanh(x @ weight)
        if number < len(params) - 1:
            x = mpmd.mark_stage_end(x)
    return jnp.mean(x**2)


def train_step(params: list[jax.Array], xs: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    loss, gradients = mpmd.treduce(
        lambda x: jax.value_and_grad(loss_fn)(params, x),
        xs,
        schedule=mpmd.Std1F1B(STAGES),
        operation=mpmd.Mean,
    )
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss


if __name__ == "__main__":
    main()
