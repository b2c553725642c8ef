"""Driver and actors hold after many steps, failures and programs what they held after a few."""

import time

import numpy as np
import pytest
import ray

import cluster
import mpmd
from tests.ray.conftest import launch
from tests.ray.test_left_out_parts import sample_step
from tests.ray.test_parts import BATCH, WEIGHTS
from tests.support.endurance import Training, assert_flat, held
from tests.support.small_plans import stacked_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    # The task that fails would need more memory than there is.
    pytest.mark.filterwarnings("ignore:group . .* of the operations:mpmd.PerformanceWarning"),
]

SECONDS, ROUNDS = 60, 2000


def held_by_all(mesh, step):
    """With recovery, right after a snapshot, when the journal has nothing else."""
    journal = mesh.runtime._ledger.journal if mesh.runtime.goes_back else None
    for _ in range(3):  # processes have two snapshots, of which neither is to have what was before
        step()
        deadline = time.monotonic() + SECONDS
        while journal is not None and journal.num_steps and time.monotonic() < deadline:
            if journal.snapshot is None:
                step()
            time.sleep(0.01)
    actors = mesh.runtime.actors
    return [held(), *ray.get([actor.__ray_call__.remote(held) for actor in actors], timeout=SECONDS)]


def test_steps_and_programs_leave_nothing(two_groups):
    training = Training(two_groups)
    training.endure(lambda: held_by_all(two_groups, training.step))


def test_steps_and_programs_leave_nothing_with_recovery(local_ray):
    with launch(recovery=cluster.Recovery(every=5)) as mesh:
        training = Training(mesh)
        training.endure(lambda: held_by_all(mesh, training.step))


class Rounds:
    """A sampler makes batches with weights of the trainer, which learns from them, on parts of a mesh."""

    def __init__(self, mesh):
        self._weights = np.array(WEIGHTS)
        train = mpmd.jit(stacked_step(2), mesh.part("trainer"), donate_argnums=0)
        self._train = train.compile(self._weights, BATCH)
        self._sample = mpmd.jit(sample_step, mesh.part("sampler")).compile(WEIGHTS, BATCH)

    def run(self, count):
        """Waits each tenth time, and in the end."""
        for number in range(count):
            # Kept until the next round: if they were dropped during a step, chance would decide whether the
            # snapshot after it already has groups drop them.
            self._copy = mpmd.reshard(self._weights, to=self._sample)
            self._batch = mpmd.reshard(self._sample(self._copy, BATCH), to=self._train, argnum=1)
            self._weights, loss = self._train(self._weights, self._batch)
            if number % 10 == 9:
                assert np.isfinite(float(loss))
        self._weights.block_until_ready()


def test_rounds_leave_nothing(local_ray):
    recovery = cluster.Recovery(every=5, parts={"sampler": None})
    parts = {"trainer": {"stage": 2}, "sampler": {"stage": 1}}
    with cluster.launch(parts=parts, cpus_per_group=0.05, timeout=200, recovery=recovery) as mesh:
        rounds = Rounds(mesh)
        rounds.run(40)
        before = held_by_all(mesh, lambda: rounds.run(1))
        rounds.run(ROUNDS)
        assert_flat(before, held_by_all(mesh, lambda: rounds.run(1)))
