"""Trials that ``mpmd doctor`` runs, each in a process of its own, which a broken installation may crash.

    python -m cluster.trial devices | in-process | ray [ADDRESS]

prints the result as one line of JSON: ``text``, a sentence for people; the devices or nodes that were seen;
and ``other_bits``, the results of a step that have other bits when it runs again. A trial that fails raises.
"""

from __future__ import annotations

import collections
import contextlib
import json
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray

import cluster
import mpmd
from cluster.start.ray_connection import connect_to_ray
from cluster.start.resources import live_nodes

GROUPS, MICROBATCHES, WIDTH = 2, 4, 8
TOLERANCE = 1e-5


def main() -> None:
    name, *address = sys.argv[1:]
    print(json.dumps({"devices": devices, "in-process": in_process, "ray": on_ray}[name](*address)))


def devices() -> dict[str, Any]:
    kinds = collections.Counter(f"{device.platform} ({device.device_kind})" for device in jax.devices())
    versions = f"Python {platform.python_version()}, jax {jax.__version__}, ray {ray.__version__}"
    return {
        "text": f"{', '.join(f'{count} of {kind}' for kind, count in kinds.items())}; {versions}",
        "devices": [{"platform": device.platform, "kind": device.device_kind} for device in jax.devices()],
    }


def in_process() -> dict[str, Any]:
    jax.config.update("jax_num_cpu_devices", GROUPS)
    chosen = jax.devices() if jax.device_count() >= GROUPS else jax.devices("cpu")
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(chosen[:GROUPS]), ("stage",)), "stage")
    text, other_bits = _compare(mesh)
    return {
        "text": f"a step on {GROUPS} groups of one {chosen[0].platform} device {text}",
        "other_bits": other_bits,
    }


def on_ray(address: str | None = None) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        stack.callback(connect_to_ray(address))
        nodes = live_nodes()
        gpus = sum(node["Resources"].get("GPU", 0) for node in nodes)
        share = gpus / GROUPS if 0 < gpus < GROUPS else None
        mesh = stack.enter_context(cluster.launch({"stage": GROUPS}, "stage", gpus_per_group=share))
        places = collections.Counter(process.node for process in mesh.processes)
        where = ", ".join(f"{count} on {node}" for node, count in places.items())
        text, other_bits = _compare(mesh)
        return {
            "text": f"a step on {GROUPS} actors ({where}; {mesh.platform}) {text}",
            "other_bits": other_bits,
            "nodes": [
                {
                    "address": node["NodeManagerAddress"],
                    "host": node["NodeManagerHostname"],
                    "cpus": node["Resources"].get("CPU", 0),
                    "gpus": node["Resources"].get("GPU", 0),
                    "memory_bytes": int(node["Resources"].get("memory", 0)),
                }
                for node in nodes
            ],
        }


def _compare(mesh: mpmd.MpmdMesh | cluster.ClusterMesh) -> tuple[str, list[str]]:
    """Runs a step on the mesh twice. Raises ``AssertionError`` when it is not what ``jax.jit`` computes.

    Returns: a text, and the results that have other bits the second time.
    """
    weights = [jnp.eye(WIDTH) / 2, jnp.eye(WIDTH) / 3]
    inputs = jnp.linspace(-1.0, 1.0, MICROBATCHES * WIDTH).reshape(MICROBATCHES, 1, WIDTH)
    reference = jax.jit(_train_step)(weights, inputs)
    step = mpmd.jit(_train_step, mesh)
    result, again = (mpmd.to_host(step(weights, inputs)) for _ in range(2))
    worst = max(
        float(np.abs(actual - expected).max())
        for actual, expected in zip(jax.tree.leaves(result), jax.tree.leaves(reference), strict=True)
    )
    assert worst < TOLERANCE, f"the step differs by {worst:.1e} from what jax.jit computes"
    pairs = zip(jax.tree.leaves_with_path(result), jax.tree.leaves(again), strict=True)
    other = [jax.tree_util.keystr(path) for (path, one), two in pairs if one.tobytes() != two.tobytes()]
    repeats = (
        f"but not the same bits again: result{', result'.join(other)}" if other else "and the same bits again"
    )
    return f"computes what jax.jit computes, {repeats}", other


def _loss(weights: list[jax.Array], inputs: jax.Array) -> jax.Array:
    """Sums, and in the backward pass adds rows several times: XLA may not repeat the bits of either."""
    hidden = mpmd.mark_stage_end(jnp.tanh(inputs @ weights[0]))
    rows = weights[1][jnp.arange(4 * WIDTH) % 2]
    return jnp.sum((hidden @ weights[1] + jax.nn.softmax(rows).mean(0) - inputs) ** 2)


def _train_step(weights: list[jax.Array], inputs: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    loss, gradients = mpmd.treduce(
        lambda microbatch: jax.value_and_grad(_loss)(weights, microbatch),
        inputs,
        schedule=mpmd.Std1F1B(GROUPS),
        operation=mpmd.Add,
    )
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients), loss


if __name__ == "__main__":
    main()
