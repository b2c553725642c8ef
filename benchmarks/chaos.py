"""Kills groups at random moments while they train, and checks that nothing changes: ``make chaos``.

A small model trains on four groups, in rounds: first undisturbed, then again and again while a thread kills,
or stops, the process of a group. It waits for one of several moments, by turns: while a program is loaded,
steps run, values are copied, a checkpoint is written or read, or groups recover. The losses and the final
state of every round have to be those of the undisturbed one, bit by bit.

While groups recover, the group opposite of the dead one is killed, so that no copy is lost with both. A group
and the one that keeps its copies die together at moments of their own: then the round goes on from its last
checkpoint.

With ``--parts``, three of the groups train on what the fourth one makes of their weights and of each batch:
``together`` with one recovery for both parts, or ``left-out``, where the fourth one is left out and the
program has it begin anew.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray

import cluster
import cluster.driver.calls.health
import mpmd
from benchmarks.chain import OPTIMIZER, train_step
from cluster.recovery import RecoveryReport

GROUPS = 4
WIDTH, ROWS, MICROBATCHES = 32, 8, 4
STEPS = 30
EVERY = 5
SAVED_AND_READ, SAVED = 10, 20
"""After one step a checkpoint is written and read; after another one it is written while steps run."""

LOADING, STEPS_RUN, COPYING, SAVING, READING = "loading", "steps", "copying values", "saving", "reading"
RECOVERING, TOGETHER = "recovering", "with its keeper"
TRAINER, SAMPLER = "trainer", "sampler"
TOGETHER_PARTS, LEFT_OUT = "together", "left-out"
MOMENTS = (LOADING, STEPS_RUN, COPYING, SAVING, READING, RECOVERING, TOGETHER)
MOMENT_SECONDS = 20.0
"""The seconds for which a moment is awaited."""

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
    parser.add_argument(
        "--spares", type=int, default=0, help="processes that wait to take a dead one's place"
    )
    parser.add_argument("--parts", choices=(TOGETHER_PARTS, LEFT_OUT), help="train with a sampler")
    args = parser.parse_args()
    cluster.driver.calls.health.PING_SECONDS = 1.0
    cluster.driver.calls.health.UNRESPONSIVE_SECONDS = STOPPED_SECONDS
    ray.init(address="local", num_cpus=GROUPS + args.spares, include_dashboard=False, log_to_driver=False)
    recovery = cluster.Recovery(
        every=EVERY,
        max_failures=10 * args.kills,
        spares=args.spares,
        parts={SAMPLER: None} if args.parts == LEFT_OUT else None,
    )
    parts = {TRAINER: GROUPS - 1, SAMPLER: 1} if args.parts else None
    with (
        cluster.launch(
            {"stage": GROUPS}, "stage", parts=parts, cpus_per_group=0.5, recovery=recovery, timeout=300
        ) as mesh,
        tempfile.TemporaryDirectory(prefix="chaos") as directory,
    ):
        run(mesh, pathlib.Path(directory), args)
    ray.shutdown()


def run(mesh: cluster.ClusterMesh, directory: pathlib.Path, args: argparse.Namespace) -> None:
    """Trains until so many processes were killed. Raises ``RuntimeError`` when a round differs."""
    trainer = SampledTrainer(mesh, directory) if mesh.parts else Trainer(mesh, directory)
    expected = trainer.train()
    killer = Killer(trainer, args.kills, random.Random(args.seed), args.stop, args.seconds)
    killer.start()
    rounds = 0
    while killer.is_alive() or not rounds:
        digest = trainer.train()
        rounds += 1
        print(f"round {rounds}, {killer.num_kills} kills: {digest}", file=sys.stderr, flush=True)
        if digest != expected:
            raise RuntimeError(f"round {rounds} differs: {digest} in place of {expected}")
    print(
        f"{killer.num_kills} processes killed or stopped in {rounds} rounds of {STEPS} steps, seed "
        f"{args.seed}; all losses and states equal, bit by bit"
    )
    for moment, count in killer.moments.items():
        print(f"  {moment}: {count}")
    report_times(mesh.recoveries, args.spares)


def report_times(recoveries: Sequence[RecoveryReport], spares: int) -> None:
    """Prints how long recoveries took, and where the time of the longest went."""
    lost = sum(report.lost is not None for report in recoveries)
    print(f"{len(recoveries)} recoveries with {spares} spares, {lost} of them from the last checkpoint")
    if recoveries:
        times = sorted(report.total for report in recoveries)
        print(
            f"seconds of a recovery: median {statistics.median(times):.1f}, {times[0]:.1f} to {times[-1]:.1f}"
        )
        print(f"the longest: {max(recoveries, key=lambda report: report.total)}")
        kinds = collections.Counter(report.kind for report in recoveries)
        print(", ".join(f"{count} {kind}" for kind, count in kinds.items()))


class Trainer:
    """Runs rounds of training.

    Attributes:
      mesh: the groups.
      moment: what it is doing.
    """

    def __init__(self, mesh: cluster.ClusterMesh, directory: pathlib.Path):
        self.mesh = mesh
        self.moment = LOADING
        self._directory = directory
        self._rounds = 0
        shape = (STEPS, 2, MICROBATCHES, ROWS, WIDTH)
        self._batches = np.random.default_rng(0).standard_normal(shape, np.float32)

    def train(self) -> str:
        """Compiles a step, trains, and returns a digest of all losses and of the final state."""
        self._rounds += 1
        path = self._directory / str(self._rounds)
        self.moment = LOADING
        step = self._compiled()
        while True:
            try:
                arrays = self._train_from(step, path, SAVED_AND_READ if path.exists() else 0)
                break
            except mpmd.StateLostError as lost:
                print(f"lost: {lost}", file=sys.stderr, flush=True)
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]

    def _compiled(self) -> Any:
        step = mpmd.jit(train_step(GROUPS), self.mesh, donate_argnums=0)
        return step.compile(initial_state(GROUPS), *self._batches[0])

    def _initial_state(self) -> Any:
        return initial_state(GROUPS)

    def _next(self, step: Any, state: Any, xs: Any, ys: Any) -> tuple[Any, Any]:
        """The state and the loss after a step."""
        return step(state, xs, ys)

    def _train_from(self, step: Any, path: pathlib.Path, first: int) -> list[np.ndarray]:
        """All losses, and the final state. The losses until the checkpoint are kept beside it."""
        losses: list[Any] = []
        state = self._initial_state()
        if first:
            losses = list(np.load(path.with_suffix(".npy")))
            state = self._read(step, path)
        for number in range(first + 1, STEPS + 1):
            self.moment = STEPS_RUN
            state, loss = self._next(step, state, *self._batches[number - 1])
            losses.append(loss)
            if number % 4 == 0:  # several steps are under way at a time
                float(loss)
            if number == SAVED_AND_READ:
                np.save(path.with_suffix(".npy"), np.array([np.asarray(each) for each in losses]))
                self.moment = SAVING
                mpmd.save(path, state)
                state = self._read(step, path)
            if number == SAVED:
                self.moment = SAVING
                saving = mpmd.save_async(tempfile.mkdtemp(dir=self._directory) + "/saved", state)
        saving.result()
        return [np.asarray(array) for array in [*losses, *jax.tree.leaves(state)]]

    def _read(self, step: Any, path: pathlib.Path) -> Any:
        self.moment = READING
        return step.restore(path)


class SampledTrainer(Trainer):
    """Trains part of the groups on batches that another group changes by their weights."""

    def _compiled(self) -> Any:
        step = mpmd.jit(train_step(GROUPS - 1), self.mesh.part(TRAINER), donate_argnums=0)
        state, (xs, _) = self._initial_state(), self._batches[0]
        self._sample = mpmd.jit(sampled, self.mesh.part(SAMPLER)).compile(state[0], xs)
        return step.compile(state, *self._batches[0])

    def _initial_state(self) -> Any:
        return initial_state(GROUPS - 1)

    def _next(self, step: Any, state: Any, xs: Any, ys: Any) -> tuple[Any, Any]:
        return step(state, self._sampled(step, state[0], xs), ys)

    def _sampled(self, step: Any, weights: Any, xs: Any) -> Any:
        """A batch. Where the sampler is left out, it is filled again after a death."""
        while True:
            try:
                drawn = self._sample(mpmd.reshard(weights, to=self._sample), xs)
                return mpmd.reshard(drawn, to=step, argnum=1)
            except mpmd.StateLostError:
                raise
            except mpmd.GroupDiedError:
                self.mesh.replace(SAMPLER, timeout=300)


def sampled(weights: Any, xs: Any) -> Any:
    """A batch, shifted by a number that all weights take part in."""
    return xs + jnp.tanh(sum(weight.sum() for weight in weights))


def initial_state(stages: int) -> Any:
    """The weights, and the state of the optimizer."""
    keys = jax.random.split(jax.random.key(0), stages)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return weights, OPTIMIZER.init(weights)


class Killer(threading.Thread):
    """Kills or stops processes, one after another.

    Args:
      trainer: what it disturbs.
      kills: how many.
      choice: of victims and moments.
      stop: the share of processes that are stopped and not killed.
      seconds: the longest time between two.

    Attributes:
      moments: how many were killed at which moment.
    """

    def __init__(self, trainer: Trainer, kills: int, choice: random.Random, stop: float, seconds: float):
        super().__init__(name="killer", daemon=True)
        self._trainer = trainer
        self._mesh = trainer.mesh
        self._kills = kills
        self._choice = choice
        self._stop_share = stop
        self._seconds = seconds
        self.moments: collections.Counter[str] = collections.Counter()

    @property
    def num_kills(self) -> int:
        return self.moments.total()

    def run(self) -> None:
        """Until so many processes were killed."""
        while self.num_kills < self._kills:
            for moment in self._choice.sample(MOMENTS, len(MOMENTS)):
                time.sleep(self._choice.uniform(0, self._seconds))
                self._disturb(moment)
                if self.num_kills >= self._kills:
                    break

    def _disturb(self, moment: str) -> None:
        """Kills a process at a moment, and perhaps another one, and waits until both are replaced."""
        first = self._choice.randrange(GROUPS)
        early = STEPS_RUN if moment in (RECOVERING, TOGETHER) else moment
        if not self._wait_for(early):
            return
        victims = self._kill(first, moment)
        if moment == TOGETHER:
            victims |= self._kill((first + 1) % GROUPS, moment)
        if moment == RECOVERING and self._wait_for(RECOVERING):
            time.sleep(self._choice.uniform(0, 2))
            victims |= self._kill((first + 2) % GROUPS, moment)
        while self._mesh.runtime.is_recovering or victims & {group.pid for group in self._mesh.groups}:
            time.sleep(0.05)

    def _wait_for(self, moment: str) -> bool:
        deadline = time.monotonic() + MOMENT_SECONDS
        while not self._is_now(moment):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _is_now(self, moment: str) -> bool:
        if moment == COPYING:
            return self._mesh.runtime.is_copying
        return self._mesh.runtime.is_recovering if moment == RECOVERING else self._trainer.moment == moment

    def _kill(self, victim: int, moment: str) -> set[int]:
        """Returns the number of the process, unless it is being replaced."""
        stopped = self._choice.random() < self._stop_share
        pid = self._mesh.groups[victim].pid
        try:
            os.kill(pid, signal.SIGSTOP if stopped else signal.SIGKILL)
        except ProcessLookupError:
            return set()
        self.moments[moment] += 1
        return {pid}


if __name__ == "__main__":
    main()
