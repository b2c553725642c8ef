"""Checkpoints that the groups write and read, beside plain Orbax in one process, with equal arrays.

The state is random numbers, which hardly compress, as trained weights do. All write to the same disk.
"""

from __future__ import annotations

import collections
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax

import mpmd
from benchmarks.frame import Rows, Setup, ratio

GROUPS = 4
SIZE, QUICK_SIZE = 2**26, 2**23
"""Elements of float32 in the state: 256 MiB and 32 MiB."""

PLAIN = "plain Orbax, one process"


class Way(NamedTuple):
    """A way to save a state to a path, and to restore it."""

    save: Callable[[str], Future | orbax.AsyncCheckpointer]
    restore: Callable[[str], Any]


def train_step(state: Any, xs: Any) -> Any:
    """Weights and their momenta, with next to no work."""

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


def run(setup: Setup) -> Rows:
    size = QUICK_SIZE if setup.quick else SIZE
    numbers = np.random.default_rng(0)
    shape = (size // GROUPS // 2 // 2**10, 2**10)
    state = tuple([numbers.standard_normal(shape, "float32") for _ in range(GROUPS)] for _ in range(2))
    xs = np.ones((GROUPS, 4), "float32")
    with setup.launch({"stage": GROUPS}, "stage", cpus_per_group=0.1) as mesh:
        step = mpmd.jit(train_step, mesh, donate_argnums=0).compile(state, xs)
        on_groups = step(state, xs)
        in_driver = jax.tree.map(jnp.asarray, mpmd.to_host(on_groups))
        ways = {
            "the groups": Way(lambda path: mpmd.save_async(path, on_groups), step.restore),
            PLAIN: Way(
                lambda path: _save_plain(path, in_driver), lambda path: _restore_plain(path, in_driver)
            ),
            "plain Orbax, after mpmd.to_host": Way(
                lambda path: _save_plain(path, mpmd.to_host(on_groups)),
                lambda path: step(_restore_plain(path, in_driver), xs),
            ),
        }
        measured = collections.defaultdict(list)
        for repetition in range(1 + setup.repetitions):
            for name, way in ways.items():
                times = _measure(way)
                if repetition:  # before, libraries are loaded
                    measured[name].append(times)
    columns = {name: list(zip(*times, strict=True)) for name, times in measured.items()}
    _, plain_complete, plain_restored, _ = columns[PLAIN]
    for name, (call, complete, restored, nbytes) in columns.items():
        yield (
            f"Checkpoints of {size * 4 / 2**20:.0f} MiB on {GROUPS} groups",
            {
                "s": name,
                "call": call,
                "complete": complete,
                "restored": restored,
                "complete / plain": ratio(complete, plain_complete),
                "restored / plain": ratio(restored, plain_restored),
                "MiB on disk": nbytes[-1] / 2**20,
            },
        )


def _measure(way: Way) -> tuple[float, float, float, int]:
    """Returns the seconds of the call, until the checkpoint is complete and of restoring, and its bytes."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/checkpoint"
        start = time.perf_counter()
        saving = way.save(path)
        call = time.perf_counter() - start
        saving.result() if isinstance(saving, Future) else saving.wait_until_finished()
        complete = time.perf_counter() - start
        nbytes = sum(file.stat().st_size for file in pathlib.Path(path).rglob("*") if file.is_file())
        start = time.perf_counter()
        jax.block_until_ready(way.restore(path))
        restored = time.perf_counter() - start
        shutil.rmtree(path)
        return call, complete, restored, nbytes


def _save_plain(path: str, state: Any) -> orbax.AsyncCheckpointer:
    checkpointer = orbax.AsyncCheckpointer(orbax.PyTreeCheckpointHandler())
    checkpointer.save(path, args=orbax.args.PyTreeSave(state))
    return checkpointer


def _restore_plain(path: str, like: Any) -> Any:
    restore_args = orbax.checkpoint_utils.construct_restore_args(like)
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=orbax.args.PyTreeRestore(like, restore_args))
