"""What cannot be saved or restored is an error that says what and where, and leaves nothing half-written."""

import contextlib
import os
import re
import resource

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import mpmd
from mpmd.checkpoint import saving
from tests.support.checkpoint_state import save_plain
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(2) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def step(mesh):
    jitted = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh, donate_argnums=0)
    return jitted.compile(init(weights(2)), *batch())


@pytest.fixture
def state(step):
    return step(init(weights(2)), *batch())[0]


@pytest.fixture(scope="module")
def large(mesh):
    """An array of random numbers of 1 MiB."""

    def noise(xs):
        total = mpmd.treduce(mpmd.mark_stage_end, xs, mpmd.ForwardOnly(2, 2), operation=mpmd.Add)
        return jax.random.normal(jax.random.key(0), (2**18,)) + total.sum()

    return mpmd.jit(noise, mesh)(jnp.ones((2, 3)))


@pytest.fixture
def saved(state, tmp_path):
    mpmd.save(tmp_path / "saved", state)
    return tmp_path / "saved"


def test_storage_that_orbax_does_not_reach(step):
    for call in (lambda path: mpmd.save(path, 1), step.restore):
        with pytest.raises(ValueError, match="s3://bucket/saved: Orbax stores checkpoints at"):
            call("s3://bucket/saved")


def test_arrays_that_are_gone_or_empty(step, state, tmp_path):
    step(state, *batch())
    params, _ = state
    with pytest.raises(ValueError) as caught:
        mpmd.save(tmp_path / "saved", {"params": params, "count": 3})
    assert "params.0.w was deleted, or donated to a step" in str(caught.value)
    assert "params.1.b was deleted" in str(caught.value)
    assert not (tmp_path / "saved").exists()


def test_arrays_of_two_meshes(state, tmp_path):
    with mesh_of(2) as other:
        step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), other)
        (params, _), _ = step(init(weights(2)), *batch())
        with pytest.raises(ValueError, match=r"there.0.b is on another mesh than here.0.b"):
            mpmd.save(tmp_path / "saved", {"here": state[0], "there": params})


def test_arrays_of_a_closed_mesh(tmp_path):
    mesh = mesh_of(2)
    step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh).compile(init(weights(2)), *batch())
    state, _ = step(init(weights(2)), *batch())
    mesh.close()
    with pytest.raises(mpmd.CheckpointError, match=r"group 0 could not write .*the mesh was closed"):
        mpmd.save(tmp_path / "saved", state)
    with pytest.raises(mpmd.CheckpointError, match=r"group 0 could not read .*the mesh was closed"):
        save_plain(tmp_path / "plain", init(weights(2)))
        mpmd.restore(tmp_path / "plain", state)


def test_a_value_that_was_lost(mesh, tmp_path):
    def failing(xs):
        def stage(x):
            return mpmd.mark_stage_end(jax.pure_callback(lambda x: 1 / 0, x, x))

        return mpmd.treduce(stage, xs, mpmd.ForwardOnly(2, 2), operation=mpmd.Add)

    lost = mpmd.jit(failing, mesh)(jnp.ones((2, 3)))
    with pytest.raises(mpmd.CheckpointError, match=r"group \d could not write .*lost when"):
        mpmd.save(tmp_path / "saved", lost)
    assert not (tmp_path / "saved").exists()


def test_arguments_that_are_not_there(step, saved, tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        step.restore(tmp_path / "missing")
    with pytest.raises(ValueError, match="there is no argument argnum=3"):
        step.restore(saved, argnum=3)
    with pytest.raises(ValueError, match=re.escape("has args[0][0][0]['b'] of a step: give the mesh")):
        mpmd.restore(saved, step.argument_leaves())


@contextlib.contextmanager
def files_of_at_most(size):
    """Writing more to a file fails for this process, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(large, tmp_path):
    """A manager keeps the checkpoint before, and the next one removes what is left."""
    (group,) = large.mpmd_idxs
    handler = mpmd.checkpoint.handler()
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        manager.save(0, args=ocp.args.PyTreeSave({"large": large}))
        manager.wait_until_finished()
        message = rf"group {group} could not write its part of the checkpoint {tmp_path}/1.*File too large"
        with files_of_at_most(2**17), pytest.raises(mpmd.CheckpointError, match=message):
            manager.save(1, args=ocp.args.PyTreeSave({"large": large}))
            manager.wait_until_finished()
        assert manager.latest_step() == 0
    assert sorted(os.listdir(tmp_path)) == ["0", "1.orbax-checkpoint-tmp"]
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with ocp.CheckpointManager(tmp_path, item_handlers=handler, options=options) as manager:
        assert manager.latest_step() == 0
        manager.save(1, args=ocp.args.PyTreeSave({"large": large}))
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_groups_keep_no_copy_when_storage_refuses_the_directory(large, tmp_path):
    with pytest.raises(OSError, match="File name too long"):
        mpmd.save(tmp_path / ("saved" * 48), large)
    assert not any(group.worker._copies for group in large.runtime._groups)


def test_storage_that_the_driver_does_not_see(large, tmp_path, monkeypatch):
    """Groups on other nodes may write to disks of their own."""
    names = iter("abcdefgh")
    monkeypatch.setattr(saving, "_writer", lambda mpmd_idx, rank: next(names))
    with pytest.raises(mpmd.CheckpointError, match=r"group 0 .*save to storage that the nodes of all groups"):
        mpmd.save(tmp_path / "saved", large)
