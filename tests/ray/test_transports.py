"""All transports behave alike within a mesh."""

import threading

import numpy as np
import pytest
import ray

import cluster
import mpmd.errors
from mpmd.errors import StepAborted
from tests.ray.hand_written_programs import (
    TRAIN_FEEDBACK,
    ProgramDriver,
    allocate_too_much,
    compute_forever,
    relay_program,
    train_program,
    train_reference,
    train_values,
    wait_until_relaying,
)
from tests.support.subprocesses import run_code

SECONDS = 60
SOON = 20
"""Seconds within which a failure ends all waiting, also on a busy machine."""


@pytest.fixture(scope="module", params=["network", "object_store"])
def mesh(local_ray, request):
    """Two groups of two devices, without shared memory, which the other tests' meshes use."""
    shape = {"stage": 2, "fsdp": 2}
    with cluster.launch(shape, "stage", cpus_per_group=0.25, transport=request.param) as mesh:
        assert mesh.transports == {(0, 1): request.param}
        yield mesh


def assert_training_matches(mesh):
    values = train_values()
    driver = ProgramDriver(mesh.runtime, train_program(), values, TRAIN_FEEDBACK)
    queued = [driver.step() for _ in range(4)]
    for futures, outputs in queued:
        loss, values = train_reference(values)
        np.testing.assert_allclose(futures[1].result(SECONDS).inline[outputs["t1"]], loss, rtol=1e-5)
    for mpmd_idx, name in enumerate(["w0", "w1"]):
        trained = mesh.runtime.fetch(mpmd_idx, driver.handles[name]).result(SECONDS)
        assert trained.flags.owndata or not mesh.runtime._calls.by_ray  # not a view of Ray's memory
        np.testing.assert_allclose(trained, values[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_groups_of_a_node_share_memory(two_groups, four_groups):
    for mesh in (two_groups, four_groups):
        assert set(mesh.transports.values()) == {"shared_memory"}
        assert len(mesh.transports) == mesh.mpmd_dim * (mesh.mpmd_dim - 1) // 2


@pytest.mark.slow
def test_training_matches_plain_jax(mesh):
    assert_training_matches(mesh)


@pytest.mark.slow
def test_with_the_object_store_the_driver_calls_groups_by_ray_alone(mesh):
    """TCP takes ports that a network may close; the object store needs none but Ray's."""
    assert mesh.runtime._calls.by_ray == (set(mesh.transports.values()) == {"object_store"})


@pytest.mark.slow
def test_a_failing_task_unblocks_the_other_group_and_training_goes_on(mesh):
    failing = ProgramDriver(mesh.runtime, relay_program(allocate_too_much), {"x": np.float32(1)})
    for _ in range(3):
        futures, _ = failing.step()
        assert type(futures[0].exception(SOON)) is mpmd.errors.TaskError
        assert type(futures[1].exception(SOON)) is StepAborted
    unsendable = ProgramDriver(mesh.runtime, relay_program(lambda x: (x + 1,)), {"x": np.float32(1)})
    unsendable.unsent["x"] = np.array([threading.Lock()], dtype=object)
    futures, _ = unsendable.step()
    assert isinstance(futures[0].exception(SOON), TypeError)
    assert type(futures[1].exception(SOON)) is StepAborted
    assert_training_matches(mesh)


@pytest.mark.slow
def test_a_killed_actor_is_named_in_all_pending_steps(mesh):
    """The last test that uses the mesh."""
    driver = ProgramDriver(mesh.runtime, relay_program(compute_forever), {"x": np.float32(1)})
    queued = [driver.step() for _ in range(2)]
    wait_until_relaying(mesh)
    ray.kill(mesh.runtime.actors[0])
    for future in (future for futures, _ in queued for future in futures.values()):
        error = future.exception(SOON)
        assert (type(error), error.mpmd_idx) == (mpmd.errors.GroupDiedError, 0)
        assert "ray.kill" in str(error)


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
