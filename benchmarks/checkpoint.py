"""Checkpoints that the groups write and read, beside plain Orbax in one process, with equal arrays.

The state is weights and their momenta, which hardly compress. All write to the same disk.
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
import optax
import orbax.checkpoint as orbax

import mpmd
from benchmarks import chain
from benchmarks.frame import Rows, Setup, ratio

GROUPS, LAYERS_PER_STAGE = 4, 2
WIDTH, QUICK_WIDTH = 2048, 512
"""With these widths the state has 256 MiB and 16 MiB."""

OPTIMIZER = optax.sgd(0.1, momentum=0.9)

PLAIN = "plain Orbax, one process"


class Way(NamedTuple):
    """A way to save a state to a path, and to restore it."""

    save: Callable[[str], Future | orbax.AsyncCheckpointer]
    restore: Callable[[str], Any]


def run(setup: Setup) -> Rows:
    width = QUICK_WIDTH if setup.quick else WIDTH
    state = chain.initial_state(GROUPS * LAYERS_PER_STAGE, width, OPTIMIZER)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    batch = chain.batch(GROUPS, 4, width)
    train_step = chain.train_step(GROUPS, LAYERS_PER_STAGE, OPTIMIZER)
    with setup.launch({"stage": GROUPS}, "stage", cpus_per_group=0.1) as mesh:
        step = mpmd.jit(train_step, mesh, donate_argnums=0).compile(state, *batch)
        on_groups, _ = step(state, *batch)
        in_driver = jax.tree.map(jnp.asarray, mpmd.to_host(on_groups))
        ways = {
            "the groups": Way(lambda path: mpmd.save_async(path, on_groups), step.restore),
            PLAIN: Way(
                lambda path: _save_plain(path, in_driver), lambda path: _restore_plain(path, in_driver)
            ),
            "plain Orbax, after mpmd.to_host": Way(
                lambda path: _save_plain(path, mpmd.to_host(on_groups)),
                lambda path: step(_restore_plain(path, in_driver), *batch),
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
            f"Checkpoints of {size / 2**20:.0f} MiB on {GROUPS} groups",
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
