"""Kills groups at random moments while they train, and checks that nothing changes: ``make chaos``.

A small model trains on four groups, in rounds: first undisturbed, then again and again while a thread kills,
or stops, the process of a group. The thread waits for one of several moments, by turns: while a program is
loaded, steps run, values are copied, a checkpoint is written or read, or groups recover. The losses and the
final state of every round have to be those of the undisturbed round, bit by bit.

While groups recover, the group opposite of the dead one is killed, so that no copy is lost with both. A group
and the keeper of its copies die together at moments of their own: then the round goes on from its last
checkpoint.

With ``--parts``, three of the groups train on batches that the fourth group draws with their weights:
``together`` with one recovery for both parts, or ``left-out``, where recovery leaves the fourth group out,
and the program starts it again.
"""

from __future__ import annotations

import collections
import hashlib
import os
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cluster
import mpmd
from benchmarks import chain
from benchmarks.frame import Rows, Setup
from cluster.driver.calls import liveness

GROUPS = 4
WIDTH, ROWS, MICROBATCHES = 32, 8, 4
STEPS = 30
EVERY = 5
SAVED_AND_READ, SAVED = 10, 20
"""After step 10 a checkpoint is written and read; after step 20 it is written while steps run."""

LOADING, STEPS_RUN, COPYING, SAVING, READING = "loading", "steps", "copying values", "saving", "reading"
RECOVERING, TOGETHER = "recovering", "with its keeper"
TRAINER, SAMPLER = "trainer", "sampler"
MOMENTS = (LOADING, STEPS_RUN, COPYING, SAVING, READING, RECOVERING, TOGETHER)
MOMENT_SECONDS = 20.0
"""The longest wait for a moment."""

STOPPED_SHARE = 0.1
"""The share of processes that are stopped and not killed."""

PAUSE_SECONDS = 4.0
"""The longest pause between kills."""

STOPPED_SECONDS = 4.0
"""The seconds without an answer after which a process counts as dead, so that a run does not take hours."""


def run(setup: Setup) -> Rows:
    """Trains until ``--kills`` processes were killed. Raises ``RuntimeError`` when a round differs."""
    options = setup.options
    liveness.PING_SECONDS = 1.0
    liveness.UNRESPONSIVE_SECONDS = STOPPED_SECONDS
    recovery = cluster.Recovery(
        every=EVERY,
        max_failures=10 * options.kills,
        parts={SAMPLER: None} if options.parts == "left-out" else None,
    )
    parts = {TRAINER: GROUPS - 1, SAMPLER: 1} if options.parts else None
    with (
        setup.launch({"stage": GROUPS}, "stage", parts=parts, cpus_per_group=0.5, recovery=recovery) as mesh,
        tempfile.TemporaryDirectory(prefix="chaos") as directory,
    ):
        trainer = (SampledTrainer if parts else Trainer)(mesh, pathlib.Path(directory))
        expected = trainer.train()
        killer = Killer(trainer, options.kills)
        killer.start()
        rounds = 0
        while killer.is_alive() or not rounds:
            digest = trainer.train()
            rounds += 1
            print(f"  round {rounds}, {killer.num_kills} kills: {digest}", file=sys.stderr, flush=True)
            if digest != expected:
                raise RuntimeError(f"round {rounds} differs: {digest} in place of {expected}")
        yield (
            "Chaos",
            {
                "killed or stopped": killer.num_kills,
                "rounds, equal bit by bit": rounds,
                **killer.moments,
            },
        )
        kinds = collections.defaultdict(list)
        for report in mesh.recoveries:
            kinds["from the last checkpoint" if report.lost else report.kind].append(report.total)
        for kind, seconds in kinds.items():
            yield (
                "Recoveries",
                {"": kind, "number": len(seconds), "s, median": seconds, "s, longest": max(seconds)},
            )


class Trainer:
    """Runs rounds of training.

    Attributes:
      mesh: the groups.
      moment: the current moment of the round, for the thread that kills.
    """

    stages = GROUPS

    def __init__(self, mesh: cluster.ClusterMesh, directory: pathlib.Path):
        self.mesh = mesh
        self.moment = LOADING
        self._directory = directory
        shape = (STEPS, 2, MICROBATCHES, ROWS, WIDTH)
        self._batches = np.random.default_rng(0).standard_normal(shape, np.float32)

    def train(self) -> str:
        """Compiles a step, trains, and returns a digest of all losses and of the final state."""
        path = pathlib.Path(tempfile.mkdtemp(dir=self._directory), "saved")
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
        step = mpmd.jit(chain.train_step(self.stages), self.mesh, donate_argnums=0)
        return step.compile(self._initial_state(), *self._batches[0])

    def _initial_state(self) -> Any:
        return chain.initial_state(self.stages, WIDTH)

    def _next(self, step: Any, state: Any, xs: Any, ys: Any) -> tuple[Any, Any]:
        """The state and the loss after a step."""
        return step(state, xs, ys)

    def _train_from(self, step: Any, path: pathlib.Path, first: int) -> list[np.ndarray]:
        """All losses, and the final state. The losses until the checkpoint are kept beside it."""
        losses: list[Any] = []
        state = self._initial_state()
        if first:
            losses = list(np.load(path.with_suffix(".npy")))
            self.moment = READING
            state = step.restore(path)
        for number in range(first + 1, STEPS + 1):
            self.moment = STEPS_RUN
            state, loss = self._next(step, state, *self._batches[number - 1])
            losses.append(loss)
            if number % 4 == 0:  # several steps are under way at a time
                float(loss)
            if number == SAVED_AND_READ:
                np.save(path.with_suffix(".npy"), [np.asarray(each) for each in losses])
                self.moment = SAVING
                mpmd.save(path, state)
                self.moment = READING
                state = step.restore(path)
            if number == SAVED:
                self.moment = SAVING
                saving = mpmd.save_async(tempfile.mkdtemp(dir=self._directory) + "/saved", state)
        saving.result()
        return [np.asarray(array) for array in [*losses, *jax.tree.leaves(state)]]


class SampledTrainer(Trainer):
    """Trains three groups on batches that the fourth group changes by their weights."""

    stages = GROUPS - 1

    def _compiled(self) -> Any:
        step = mpmd.jit(chain.train_step(self.stages), self.mesh.part(TRAINER), donate_argnums=0)
        state, (xs, _) = self._initial_state(), self._batches[0]
        sample = mpmd.jit(sampled, self.mesh.part(SAMPLER))
        self._sample = self._replacing(lambda: sample.compile(state[0], xs))
        return step.compile(state, *self._batches[0])

    def _next(self, step: Any, state: Any, xs: Any, ys: Any) -> tuple[Any, Any]:
        def draw() -> Any:
            drawn = self._sample(mpmd.reshard(state[0], to=self._sample), xs)
            return mpmd.reshard(drawn, to=step, argnum=1)

        return step(state, self._replacing(draw), ys)

    def _replacing(self, call: Callable[[], Any]) -> Any:
        """Calls the sampler, and replaces it after a death, where recovery leaves it out."""
        while True:
            try:
                return call()
            except mpmd.StateLostError:
                raise
            except mpmd.GroupDiedError:
                self.mesh.replace(SAMPLER, timeout=300)


def sampled(weights: Any, xs: Any) -> Any:
    """Returns the batch, shifted by a number to which all weights contribute."""
    return xs + jnp.tanh(sum(weight.sum() for weight in weights))


class Killer(threading.Thread):
    """Kills or stops processes, one after another.

    Args:
      trainer: the training to disturb.
      kills: the number of kills.

    Attributes:
      moments: the number of kills, by moment.
    """

    def __init__(self, trainer: Trainer, kills: int):
        super().__init__(name="killer", daemon=True)
        self._trainer = trainer
        self._mesh = trainer.mesh
        self._kills = kills
        self._choice = random.Random(0)
        self.moments = collections.Counter[str]()

    @property
    def num_kills(self) -> int:
        return self.moments.total()

    def run(self) -> None:
        while self.num_kills < self._kills:
            for moment in self._choice.sample(MOMENTS, len(MOMENTS)):
                time.sleep(self._choice.uniform(0, PAUSE_SECONDS))
                self._disturb(moment)
                if self.num_kills >= self._kills:
                    break

    def _disturb(self, moment: str) -> None:
        """Kills a process at a moment, at some a second process, and waits until all are replaced."""
        first = self._choice.randrange(GROUPS)
        if not self._wait_for(STEPS_RUN if moment in (RECOVERING, TOGETHER) else moment):
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
        runtime = self._mesh.runtime
        now = {COPYING: runtime.is_copying, RECOVERING: runtime.is_recovering}
        return now.get(moment, self._trainer.moment == moment)

    def _kill(self, victim: int, moment: str) -> set[int]:
        """Kills or stops a process; returns its number, or nothing if it is being replaced."""
        stopped = self._choice.random() < STOPPED_SHARE
        pid = self._mesh.groups[victim].pid
        try:
            os.kill(pid, signal.SIGSTOP if stopped else signal.SIGKILL)
        except ProcessLookupError:
            return set()
        self.moments[moment] += 1
        return {pid}
