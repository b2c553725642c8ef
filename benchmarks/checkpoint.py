"""Checkpoints that the groups write and read, against plain Orbax in one process, with equal arrays.

The state is random numbers, which hardly compress, as trained weights do. Both write to the same disk.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax

import cluster
import mpmd
from benchmarks.measure import Conditions, Result, Table, ratio
from benchmarks.peers.ours import START_SECONDS

GROUPS = 4
SIZE, QUICK_SIZE = 2**26, 2**23
"""Elements of float32 in the state: 256 MiB and 32 MiB."""
OURS, PLAIN, BY_DRIVER = "the groups", "plain Orbax, one process", "plain Orbax, after mpmd.to_host"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to save a state, and to restore it."""

    save: Callable[[str], Future | orbax.AsyncCheckpointer]
    restore: Callable[[str], Any]


@dataclasses.dataclass
class Times:
    """Seconds, one for each repetition, and the bytes on disk."""

    call: list[float] = dataclasses.field(default_factory=list)
    complete: list[float] = dataclasses.field(default_factory=list)
    restored: list[float] = dataclasses.field(default_factory=list)
    nbytes: int = 0


def train_step(state: Any, xs: Any) -> Any:
    """Weights and their momenta, of which little is computed."""

    def loss(weights, x):
        for i, weight in enumerate(weights):
            x = x * (1 + jnp.mean(weight))
            if i < GROUPS - 1:
                x = mpmd.mark_stage_end(x)
        return jnp.mean(x**2)

    weights, momenta = state
    _, gradients = mpmd.treduce(
        lambda x: jax.value_and_grad(loss)(weights, x), xs, mpmd.Std1F1B(GROUPS), operation=mpmd.Add
    )
    momenta = jax.tree.map(lambda momentum, gradient: 0.9 * momentum + gradient, momenta, gradients)
    return jax.tree.map(lambda weight, momentum: weight - momentum, weights, momenta), momenta


def run(conditions: Conditions) -> Result:
    size = QUICK_SIZE if conditions.quick else SIZE
    numbers = np.random.default_rng(0)
    shape = (size // GROUPS // 2 // 2**10, 2**10)
    state = tuple([numbers.standard_normal(shape, "float32") for _ in range(GROUPS)] for _ in range(2))
    xs = np.ones((GROUPS, 4), "float32")
    with cluster.launch({"stage": GROUPS}, "stage", cpus_per_group=0.1, timeout=START_SECONDS) as mesh:
        step = mpmd.jit(train_step, mesh, donate_argnums=0).compile(state, xs)
        there = step(state, xs)
        here = jax.tree.map(jnp.asarray, mpmd.to_host(there))
        ways = {
            OURS: Way(lambda path: mpmd.save_async(path, there), step.restore),
            PLAIN: Way(lambda path: _plain(path, here), lambda path: _plain_restored(path, here)),
            BY_DRIVER: Way(
                lambda path: _plain(path, mpmd.to_host(there)),
                lambda path: step(_plain_restored(path, here), xs),
            ),
        }
        found = _measure(ways, conditions.effort.repetitions)
    return Result(
        [_table(size, found)], [], {name: dataclasses.asdict(times) for name, times in found.items()}
    )


def _measure(ways: dict[str, Way], repetitions: int) -> dict[str, Times]:
    found = {name: Times() for name in ways}
    for repetition in range(1 + repetitions):  # the first time, libraries are loaded
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as directory:
                _measure_once(way, f"{directory}/checkpoint", found[name])
            if not repetition:
                found[name] = Times()
    return found


def _measure_once(way: Way, path: str, times: Times) -> None:
    start = time.perf_counter()
    saving = way.save(path)
    times.call.append(time.perf_counter() - start)
    saving.result() if isinstance(saving, Future) else saving.wait_until_finished()
    times.complete.append(time.perf_counter() - start)
    times.nbytes = sum(file.stat().st_size for file in pathlib.Path(path).rglob("*") if file.is_file())
    start = time.perf_counter()
    jax.block_until_ready(way.restore(path))
    times.restored.append(time.perf_counter() - start)
    shutil.rmtree(path)


def _plain(path: str, state: Any) -> orbax.AsyncCheckpointer:
    checkpointer = orbax.AsyncCheckpointer(orbax.PyTreeCheckpointHandler())
    checkpointer.save(path, args=orbax.args.PyTreeSave(state))
    return checkpointer


def _plain_restored(path: str, like: Any) -> Any:
    restore_args = orbax.checkpoint_utils.construct_restore_args(like)
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=orbax.args.PyTreeRestore(like, restore_args))


def _table(size: int, found: dict[str, Times]) -> Table:
    rows = [
        (
            name,
            *(f"{_median(seconds):.2f}" for seconds in (times.call, times.complete, times.restored)),
            f"{ratio(times.complete, found[PLAIN].complete):.2f}",
            f"{ratio(times.restored, found[PLAIN].restored):.2f}",
            f"{times.nbytes / 2**20:.0f}",
        )
        for name, times in found.items()
    ]
    header = (
        f"seconds; {size * 4 / 2**20:.0f} MiB on {GROUPS} groups",
        "call",
        "complete",
        "restored",
        "complete / plain",
        "restored / plain",
        "MiB on disk",
    )
    return Table("Checkpoints", header, tuple(rows))


def _median(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]
