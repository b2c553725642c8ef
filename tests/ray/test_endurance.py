"""Driver and actors hold after many steps, failures and programs what they held after the first."""

import time

import pytest
import ray

import cluster
from tests.support.endurance import Training, held

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    # The task that fails would need more memory than there is.
    pytest.mark.filterwarnings("ignore:group . .* of the operations:mpmd.PerformanceWarning"),
]

SECONDS = 60


def held_by_all(actors):
    return [held(), *ray.get([actor.__ray_call__.remote(held) for actor in actors], timeout=SECONDS)]


def test_steps_and_programs_leave_nothing(two_groups):
    actors = two_groups.runtime.actors
    Training(two_groups).endure(lambda: held_by_all(actors))


def test_steps_and_programs_leave_nothing_with_recovery(local_ray):
    recovery = cluster.Recovery(every=5)
    with cluster.launch({"stage": 2}, "stage", cpus_per_group=0.25, recovery=recovery) as mesh:
        training = Training(mesh)

        def measure():
            """Right after a snapshot, when the journal has nothing else."""
            journal = mesh.runtime._ledger.journal
            for _ in range(3):  # processes have two snapshots, of which neither is to have what was before
                training.step()
                deadline = time.monotonic() + SECONDS
                while journal.num_steps and time.monotonic() < deadline:
                    if journal.snapshot is None:
                        training.step()
                    time.sleep(0.01)
            return held_by_all(mesh.runtime._processes.actors)

        training.endure(measure)
