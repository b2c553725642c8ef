"""The blocks of ``docs/how_to/ray_tune_and_train.md``, on the tests' Ray."""

import os
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import ray
from ray.util.placement_group import placement_group_table

from cluster.start import resources
from tests.support.pages import blocks, run
from tests.support.parity import assert_close

BLOCKS = blocks("how_to/ray_tune_and_train.md")
# Ray Tune and Ray Train use what other libraries will not have any more.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def names():
    return run(BLOCKS)


def trained(names, learning_rate, num_steps):
    """The state and the losses of so many steps in plain JAX."""
    train_step, init = names["make_step"](learning_rate)
    step, state, losses = jax.jit(train_step), init(jax.random.key(0)), []
    for _ in range(num_steps):
        state, loss = step(state, names["x"], names["y"])
        losses.append(float(loss))
    return state, losses


def reserved():
    """The names of the placement groups that are there."""
    return {group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trials_compute_what_plain_jax_computes(local_ray, names, tmp_path):
    before = reserved()
    best = names["tune_learning_rate"](storage_path=str(tmp_path))
    expected = {rate: trained(names, rate, 5)[1][-1] for rate in (1e-3, 1e-2)}
    assert best.config["learning_rate"] == min(expected, key=expected.get)
    np.testing.assert_allclose(best.metrics["loss"], min(expected.values()), rtol=1e-5)
    assert reserved() == before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_dies_goes_on_from_its_checkpoint(local_ray, names, tmp_path):
    train = names["train"]  # not all names, which have the builtins too

    def dying(config):
        """Ends its process after the second checkpoint, the first time."""
        import mpmd

        save, died = mpmd.save, pathlib.Path(config["checkpoints"]) / "died"

        def save_and_die(path, state):
            save(path, state)
            if path.name == "4" and not died.exists():
                died.touch()
                os._exit(1)

        mpmd.save = save_and_die
        train(config)

    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    before = reserved()
    result = names["run_train_job"](dying, str(checkpoints), storage_path=str(tmp_path / "results"))
    assert result.error is None
    assert (checkpoints / "died").exists()
    expected, _ = trained(names, 1e-2, 6)
    actual = ocp.StandardCheckpointer().restore(checkpoints / "6", expected)
    assert_close(actual, expected)
    assert reserved() == before


@pytest.mark.slow
def test_what_a_dead_actor_has_reserved_is_given_back(local_ray):
    @ray.remote(num_cpus=0)
    class Driver:
        def reserve(self):
            return resources.reserve([{"CPU": 0.01}], 30).id.hex()

        def die(self):
            os._exit(1)

    alive, dead = Driver.remote(), Driver.remote()
    kept, left = ray.get([alive.reserve.remote(), dead.reserve.remote()])
    ours = resources.reserve([{"CPU": 0.01}], 30)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(dead.die.remote())
    assert placement_group_table()[left]["state"] == "CREATED"
    later = resources.reserve([{"CPU": 0.01}], 30)  # as the next launch of the job does
    states = {name: placement_group_table()[name]["state"] for name in (kept, left, ours.id.hex())}
    assert states == {kept: "CREATED", left: "REMOVED", ours.id.hex(): "CREATED"}
    resources.remove_all([ours, later])
    ray.kill(alive)
