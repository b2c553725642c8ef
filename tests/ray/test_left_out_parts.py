"""Parts that recovery leaves out, on Ray: a sampler and a trainer whose groups are killed in turn."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cluster
import mpmd
from mpmd.errors import GroupDiedError
from tests.ray.test_parts import BATCH
from tests.ray.test_parts import WEIGHTS as WEIGHTS_OF_JAX
from tests.support.small_plans import stacked_step
from tests.support.waiting import await_that

WEIGHTS = np.array(WEIGHTS_OF_JAX)  # which no step deletes
PARTS = {"trainer": {"stage": 2}, "sampler": {"stage": 1, "model": 2}}


@pytest.fixture(scope="module")
def mesh(local_ray):
    recovery = cluster.Recovery(every=3, max_failures=9, parts={"sampler": None})
    with cluster.launch(
        parts=PARTS, processes_per_group=[1, 1, 2], cpus_per_group=0.05, timeout=200, recovery=recovery
    ) as mesh:
        yield mesh


def reports_of(mesh, count):
    """The last report, when there are so many: they follow what they report on."""
    await_that(lambda: len(mesh.recoveries) >= count, 60)
    assert len(mesh.recoveries) == count
    return mesh.recoveries[-1]


def sample_step(weights, x):
    """A value that the batch of the next step is made of."""
    return x + jnp.tanh(weights.sum(0)).mean()


class Run:
    """Trains on what a sampler makes of the weights of the step before.

    Attributes:
      failures: the errors of the sampler's steps, which were then asked again.
    """

    def __init__(self, mesh):
        self.mesh = mesh
        self.failures = []
        self.train = mpmd.jit(stacked_step(2), mesh.part("trainer"), donate_argnums=0).compile(WEIGHTS, BATCH)
        specs = (P(None, None, "model"), None)
        self.sample = mpmd.jit(sample_step, mesh.part("sampler"), in_shardings=specs).compile(WEIGHTS, BATCH)

    def __call__(self, kills=None):
        """The bytes of all losses and of the last weights; group ``kills[n]`` is killed in round n."""
        weights, losses, kills = WEIGHTS, [], kills or {}
        for number in range(8):
            batch = self._sampled(weights)
            if number in kills:
                os.kill(self.mesh.groups[kills[number]].pid, signal.SIGKILL)
            weights, loss = self.train(weights, batch)
            losses.append(loss)
        return [np.asarray(value).tobytes() for value in (*losses, weights)]

    def _sampled(self, weights):
        while True:
            try:
                copy = mpmd.reshard(weights, to=self.sample)
                return mpmd.reshard(self.sample(copy, BATCH), to=self.train, argnum=1)
            except GroupDiedError as error:
                self.failures.append(error)
                self.mesh.replace("sampler", timeout=120)


@pytest.mark.slow
def test_all_results_are_the_same_when_groups_of_both_parts_die(mesh):
    run = Run(mesh)
    expected = run()
    assert not run.failures
    assert run({2: 2, 5: 2}) == expected  # the sampler, which begins anew
    assert 2 <= len(run.failures) <= 4 and all(error.mpmd_idx == 2 for error in run.failures)
    reports_of(mesh, 2)
    assert [(report.kind, report.mpmd_idxs) for report in mesh.recoveries] == [("replaced", (2,))] * 2
    assert run({3: 1}) == expected  # a trainer
    assert reports_of(mesh, 3).kind == "died" and mesh.recoveries[-1].mpmd_idxs == (1,)
    assert run({2: 2, 3: 0}) == expected  # both: the trainer's recovery replaces the sampler, too


@pytest.mark.slow
def test_the_trainer_goes_on_while_the_sampler_is_dead(mesh):
    run = Run(mesh)
    copy = mpmd.reshard(WEIGHTS, to=run.sample)
    copy.block_until_ready()
    before = len(mesh.recoveries)
    os.kill(mesh.groups[2].pid, signal.SIGKILL)
    with pytest.raises(GroupDiedError, match="group 2"):
        run.sample(copy, BATCH).block_until_ready()
    weights = WEIGHTS
    for _ in range(5):
        weights, loss = run.train(weights, BATCH)
    assert np.isfinite(float(loss)) and len(mesh.recoveries) == before
    norm = mpmd.jit(lambda weights: jnp.square(weights).sum(), mesh.part("trainer"))(weights)
    assert np.isfinite(float(norm))
    with pytest.raises(GroupDiedError, match="group 2"):
        mpmd.reshard(weights, to=run.sample).block_until_ready()
    with pytest.raises(GroupDiedError, match="group 2"):
        mpmd.jit(lambda x: x + 1, mesh.part("sampler"))(BATCH)
    mesh.replace(mesh.part("sampler"), timeout=120)
    assert reports_of(mesh, before + 1).num_replayed == 0
    with pytest.raises(GroupDiedError, match=r"group 2 was replaced, and the values that it had are lost"):
        run.sample(copy, BATCH).block_until_ready()
    with pytest.raises(GroupDiedError, match=r"group 2 was replaced"):
        np.asarray(copy)
    filled = mpmd.reshard(weights, to=run.sample)
    np.testing.assert_array_equal(np.asarray(filled), np.asarray(weights))
    expected = jax.jit(sample_step)(np.asarray(weights), BATCH)
    np.testing.assert_allclose(np.asarray(run.sample(filled, BATCH)), expected, rtol=1e-5)
    mesh.replace("sampler")  # all live: nothing to do
    assert len(mesh.recoveries) == before + 1


@pytest.mark.slow
def test_steps_that_could_not_run_again_are_refused(mesh):
    part, sampler = mesh.part("trainer"), mesh.part("sampler")
    trained = mpmd.reshard(WEIGHTS, to=part)
    copy = mpmd.reshard(trained, to=sampler)
    with pytest.raises(ValueError, match=r"on group 0, which recover, and on group 2, .*mpmd\.reshard"):
        mpmd.jit(lambda a, b: (a + b, a - b), mesh)(trained, copy)
    with pytest.raises(ValueError, match="groups of the part 'trainer' are replaced by themselves"):
        mesh.replace("trainer")
    with pytest.raises(ValueError, match="there is no part 'other'"):
        mesh.replace("other")
