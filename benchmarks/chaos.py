"""Kills groups at random moments while they train, and checks that nothing changes: ``make chaos``.

A small model trains on four groups, in rounds: first undisturbed, then again and again while a thread kills,
or stops, the process of a group at random moments: while steps run, programs load, values are copied, and
groups recover. The losses and the final state of every round have to be those of the undisturbed one, bit by
bit. Two deaths of which one is that of the group that keeps the other's copies would end the run, as they
have to; so while groups recover, only the one opposite of the dead one is killed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import statistics
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
import ray

import cluster
import cluster.health
import mpmd
from benchmarks.chain import OPTIMIZER, train_step

GROUPS = 4
WIDTH, ROWS, MICROBATCHES = 32, 8, 4
STEPS = 30
EVERY = 5
STOPPED_SECONDS = 4.0
"""In this run, a process that does not answer for so long counts as dead, so that it does not take hours."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", type=float, default=0.1, help="the share of processes that are stopped")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="the longest time from one kill to the next"
    )
    args = parser.parse_args()
    cluster.health.PING_SECONDS = 1.0
    cluster.health.UNRESPONSIVE_SECONDS = STOPPED_SECONDS
    ray.init(address="local", num_cpus=GROUPS, include_dashboard=False, log_to_driver=False)
    recovery = cluster.Recovery(every=EVERY, max_failures=10 * args.kills)
    with cluster.launch(
        {"stage": GROUPS}, "stage", cpus_per_group=0.5, recovery=recovery, timeout=300
    ) as mesh:
        run(mesh, args.kills, args.seed, args.stop, args.seconds)
    ray.shutdown()


def run(mesh: cluster.ClusterMesh, kills: int, seed: int, stop: float, seconds: float) -> None:
    """Trains until so many processes were killed. Raises ``RuntimeError`` when a round differs."""
    expected = train(mesh)
    killer = Killer(mesh, kills, random.Random(seed), stop, seconds)
    killer.start()
    rounds = 0
    while killer.is_alive() or not rounds:
        digest = train(mesh)
        rounds += 1
        print(f"round {rounds}, {killer.num_kills} kills: {digest}", file=sys.stderr, flush=True)
        if digest != expected:
            raise RuntimeError(f"round {rounds} differs: {digest} in place of {expected}")
    times = sorted(report.total for report in mesh.recoveries)
    print(
        f"{killer.num_kills} processes killed or stopped in {rounds} rounds of {STEPS} steps, seed {seed}; "
        f"{len(times)} recoveries; all losses and states equal, bit by bit"
    )
    if times:
        print(
            f"seconds of a recovery: median {statistics.median(times):.1f}, least {times[0]:.1f}, "
            f"most {times[-1]:.1f}"
        )


def train(mesh: cluster.ClusterMesh) -> str:
    """Compiles a step, trains, and returns a digest of all losses and of the final state."""
    state = initial_state()
    batches = np.random.default_rng(0).standard_normal((STEPS, 2, MICROBATCHES, ROWS, WIDTH), np.float32)
    step = mpmd.mpmd_jit_with_loop(train_step(GROUPS), mesh, donate_argnums=0)
    losses = []
    for xs, ys in batches:
        state, loss = step(state, xs, ys)
        losses.append(loss)
        if len(losses) % 4 == 0:  # several steps are under way at a time
            float(loss)
    arrays = [*losses, *jax.tree.leaves(state)]
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in arrays)).hexdigest()[:16]


def initial_state() -> Any:
    """The weights, and the state of the optimizer."""
    keys = jax.random.split(jax.random.key(0), GROUPS)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return weights, OPTIMIZER.init(weights)


class Killer(threading.Thread):
    """Kills or stops processes, one after another, at random moments.

    Args:
      mesh: whose processes it kills.
      kills: how many.
      choice: of victims and moments.
      stop: the share of processes that are stopped and not killed.
      seconds: the longest time between two.
    """

    def __init__(
        self, mesh: cluster.ClusterMesh, kills: int, choice: random.Random, stop: float, seconds: float
    ):
        super().__init__(name="killer", daemon=True)
        self._mesh = mesh
        self._kills = kills
        self._choice = choice
        self._stop_share = stop
        self._seconds = seconds
        self.num_kills = 0

    def run(self) -> None:
        """Until so many processes were killed."""
        while self.num_kills < self._kills:
            time.sleep(self._choice.uniform(0, self._seconds))
            first = self._choice.randrange(GROUPS)
            victims = self._kill(first)
            if self.num_kills < self._kills and self._choice.random() < 0.3:
                time.sleep(self._choice.uniform(0, 5))
                victims |= self._kill((first + 2) % GROUPS)
            while self._mesh.runtime.is_recovering or victims & {group.pid for group in self._mesh.groups}:
                time.sleep(0.05)

    def _kill(self, victim: int) -> set[int]:
        """Returns the number of the process, unless it is being replaced."""
        stopped = self._choice.random() < self._stop_share
        pid = self._mesh.groups[victim].pid
        try:
            os.kill(pid, signal.SIGSTOP if stopped else signal.SIGKILL)
        except ProcessLookupError:
            return set()
        self.num_kills += 1
        return {pid}


if __name__ == "__main__":
    main()
