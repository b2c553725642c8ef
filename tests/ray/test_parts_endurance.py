"""Driver and actors hold after many rounds of copying, sampling and training what they held after a few."""

import time

import numpy as np
import pytest
import ray

import cluster
import mpmd
from tests.ray.test_left_out_parts import sample_step
from tests.ray.test_parts import BATCH, WEIGHTS
from tests.support.endurance import assert_flat, held
from tests.support.small_plans import stacked_step

SECONDS, COUNT = 60, 2000


class Rounds:
    """A sampler makes batches with weights of the trainer, which learns from them, on parts of a mesh."""

    def __init__(self, mesh):
        self._mesh = mesh
        self._train = mpmd.jit(stacked_step(2), mesh.part("trainer"), donate_argnums=0)
        self._weights = np.array(WEIGHTS)
        self._train = self._train.compile(self._weights, BATCH)
        self._sample = mpmd.jit(sample_step, mesh.part("sampler")).compile(WEIGHTS, BATCH)

    def run(self, count):
        """Waits each tenth time."""
        for number in range(count):
            copy = mpmd.reshard(self._weights, to=self._sample)
            batch = mpmd.reshard(self._sample(copy, BATCH), to=self._train, argnum=1)
            self._weights, loss = self._train(self._weights, batch)
            if number % 10 == 9:
                assert np.isfinite(float(loss))

    def held(self):
        """What each process holds, with nothing under way."""
        for _ in range(3):  # groups drop what the program has dropped with the next step
            self.run(1)
            self._weights.block_until_ready()
            self._settle()
        actors = self._mesh.runtime.actors
        return [held(), *ray.get([actor.__ray_call__.remote(held) for actor in actors], timeout=SECONDS)]

    def _settle(self):
        """With recovery, until the log is short: a snapshot has just counted."""
        journal = getattr(getattr(self._mesh.runtime, "_requests", None), "journal", None)
        deadline = time.monotonic() + SECONDS
        while journal is not None and journal.num_steps and time.monotonic() < deadline:
            if journal.snapshot is None:
                self.run(1)
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "recovery",
    [
        pytest.param(None, id="without"),
        pytest.param(cluster.Recovery(every=5, parts={"sampler": None}), id="left out"),
    ],
)
def test_rounds_leave_nothing(local_ray, recovery):
    parts = {"trainer": {"stage": 2}, "sampler": {"stage": 1}}
    with cluster.launch(parts=parts, cpus_per_group=0.05, timeout=200, recovery=recovery) as mesh:
        rounds = Rounds(mesh)
        rounds.run(40)
        before = rounds.held()
        rounds.run(COUNT)
        assert_flat(before, rounds.held())
