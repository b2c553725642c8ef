"""All transports behave alike within a mesh."""

import threading
import time

import jax
import numpy as np
import pytest
import ray

import mpmd
from cluster.transports.choice import NAMES
from mpmd.errors import GroupDiedError, StepAborted, TaskError
from tests.ray.conftest import launch
from tests.ray.hand_written_programs import (
    allocate_too_much,
    assert_messages_keep_every_bit,
    compute_forever,
    relay_program,
    relaying,
    wait_until_relaying,
)
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import assert_close
from tests.support.subprocesses import run_code

STEP = make_step(mse, mpmd.Std1F1B(2))
SOON = 20
"""Seconds within which a failure ends all waiting, also on a busy machine."""


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "object_store"]


def has_opened_a_port(actor):
    return actor._router._listener is not None


@pytest.fixture(scope="module", params=["object_store", *OTHERS])
def mesh(local_ray, request):
    """Two groups of two devices, with one of the transports."""
    shape = {"stage": 2, "fsdp": 2}
    with launch(shape, transport=request.param) as mesh:
        assert mesh.transports == {(0, 1): request.param}
        # TCP takes ports that a network may close; the object store needs none but Ray's.
        assert mesh.runtime._calls.by_ray == (request.param == "object_store")
        opened = ray.get([actor.__ray_call__.remote(has_opened_a_port) for actor in mesh.runtime.actors])
        assert opened == [request.param != "object_store"] * 2
        yield mesh


def test_messages_keep_every_bit(mesh):
    assert_messages_keep_every_bit(mesh)


def test_a_failing_task_unblocks_the_other_group_and_training_goes_on(mesh):
    failing = relaying(mesh, allocate_too_much)
    for _ in range(3):
        futures, _ = failing.step()
        error = futures[0].exception(SOON)
        assert (type(error), error.mpmd_idx, error.label) == (TaskError, 0, "fwd_0__0")
        assert "fwd_0__0 failed on group 0" in str(error) and "RESOURCE_EXHAUSTED" in str(error)
        assert "executor.py" in str(error.__cause__)  # the traceback of the group's process
        aborted = futures[1].exception(SOON)
        assert type(aborted) is StepAborted and "fwd_0__0 failed on group 0" in str(aborted)
    unsendable = relaying(mesh)
    unsendable.unsent["x"] = np.array([threading.Lock()], dtype=object)  # a lock does not pickle
    futures, _ = unsendable.step()
    assert isinstance(futures[0].exception(SOON), TypeError)
    assert type(futures[1].exception(SOON)) is StepAborted
    step, plain = mpmd.jit(STEP, mesh), jax.jit(STEP)
    state = expected = init(weights(2))
    for _ in range(4):
        state, _ = step(state, *batch())
        expected, _ = plain(expected, *batch())
    assert_close(state, expected)
    trained = mesh.runtime.fetch(0, state[0][0]["w"].handle).result(SOON)
    assert trained.flags.owndata or not mesh.runtime._calls.by_ray  # not a view of Ray's memory


def test_an_actor_killed_in_a_step_is_named_at_once_in_all_that_is_pending(mesh):
    """The last test that uses the mesh. By the network the victim waits, by the object store it computes."""
    driver = relaying(mesh, compute_forever)
    steps = [driver.step() for _ in range(3)]
    victim = 0 if mesh.runtime._calls.by_ray else 1
    fetch = mesh.runtime.fetch(victim, driver.handles["x"])
    wait_until_relaying(mesh)
    start = time.monotonic()
    ray.kill(mesh.runtime.actors[victim])
    pending = [fetch, *(future for futures, _ in steps for future in futures.values())]
    for error in [future.exception(SOON) for future in pending]:
        assert (type(error), error.mpmd_idx) == (GroupDiedError, victim)
        assert f"group {victim} died" in str(error) and "ray.kill" in str(error)
        assert f"pid {mesh.groups[victim].pid}" in str(error) and ".err" in str(error)
    later, _ = driver.step()
    for future in [*later.values(), mesh.runtime.fetch(victim, driver.handles["x"])]:
        error = future.exception(SOON)
        assert (type(error), error.mpmd_idx) == (GroupDiedError, victim)
    with pytest.raises(GroupDiedError, match=f"group {victim} died"):
        mesh.runtime.load(relay_program(compute_forever))
    assert time.monotonic() - start < SOON


TWO_NODES = """
    import jax, pytest, ray
    from ray.cluster_utils import Cluster
    import cluster, mpmd
    from tests.support.models import CLIPPED_ADAM, batch, init, make_step, mse, weights
    from tests.support.parity import assert_close

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address)
    with cluster.launch({"stage": 3}, "stage", cpus_per_group=1) as mesh:
        print(mesh, sorted(mesh.transports.values()))

        step = make_step(mse, mpmd.Std1F1B(3), CLIPPED_ADAM)
        compiled = mpmd.jit(step, mpmd_mesh=mesh)
        expected = state = init(weights(3), CLIPPED_ADAM)
        for _ in range(3):
            state, _ = compiled(state, *batch())
            expected, _ = jax.jit(step)(expected, *batch())
        assert_close(state, expected, 1e-4)

        ray.kill(mesh.runtime.actors[2])
        with pytest.raises(mpmd.GroupDiedError, match="group 2 died"):
            while True:
                state, (loss, _) = compiled(state, *batch())
                float(loss)
    ray.shutdown()
    nodes.shutdown()
"""


@pytest.mark.slow
def test_groups_on_two_nodes():
    """Two raylets on this machine: groups of one share memory, others use the network."""
    printed, _ = run_code(TWO_NODES, seconds=180)
    assert "nodes=2) ['network', 'network', 'shared_memory']" in printed
