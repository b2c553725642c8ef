"""What the groups save is one ordinary Orbax checkpoint."""

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import mpmd
from mpmd.checkpoint import reservation
from mpmd.runtime.requests import CopyOut, StepRequest, Write
from tests.support.asked import note_requests
from tests.support.checkpoint_state import compiled, initial_state, tokens
from tests.support.digests import digests
from tests.support.parity import mesh_of


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(2, fsdp=2) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def step(mesh):
    return compiled(mesh, mpmd.Std1F1B(2), sharded=True)


@pytest.fixture
def state(step):
    return step(initial_state(), tokens())[0]


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@pytest.mark.slow
def test_orbax_restores_it_without_this_project(state, tmp_path):
    assert state["params"]["embedding"].mpmd_idxs == (0, 1)  # tied
    assert state["params"]["embedding"].spec == jax.sharding.PartitionSpec("fsdp")
    mpmd.save(tmp_path / "saved", {"state": state, "epoch": 3, "none": None})
    script = Path(__file__).parents[1] / "support" / "plain_orbax.py"
    target = {"state": abstract(state), "epoch": 0, "none": None}
    ran = subprocess.run(
        [sys.executable, script, tmp_path / "saved"],
        input=pickle.dumps(target),
        capture_output=True,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert ran.returncode == 0, ran.stderr.decode()
    found = json.loads(ran.stdout)
    assert len(found) == 5
    for way, restored in found.items():
        assert restored == [digests(mpmd.to_host(state)), 3, None], way


def test_arrays_of_this_process_are_saved_with_those_of_groups(mesh, step, state, tmp_path):
    local = {"key": jax.random.key(3), "jax": jnp.arange(4), "numpy": np.arange(3.0), "name": "run"}
    mpmd.save(tmp_path / "saved", {"state": state, **local})
    target = {"state": step.argument_leaves(), **local, "key": jax.eval_shape(lambda: local["key"])}
    restored = mpmd.restore(tmp_path / "saved", target, mesh)
    assert digests(mpmd.to_host(restored.pop("state"))) == digests(mpmd.to_host(state))
    assert restored.pop("name") == local.pop("name")
    assert digests(restored) == digests(local)
    assert isinstance(restored["key"], jax.Array)


def test_a_value_on_several_groups_is_written_once(state, tmp_path):
    mpmd.save(tmp_path / "saved", state)

    def written_by(group):
        base = {"driver": "file", "path": f"{tmp_path}/saved/ocdbt.process_g{group}p0/"}
        return {
            key.decode()
            for key in ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
        }

    chunks = [{key for key in written_by(group) if not key.endswith("zarr.json")} for group in (0, 1)]
    assert not chunks[0] & chunks[1]
    assert {key for key in chunks[0] if key.startswith("params.embedding/")} == {
        "params.embedding/c/0/0",
        "params.embedding/c/1/0",
    }


def test_later_steps_may_take_over_what_is_being_saved(step, state, tmp_path, monkeypatch):
    """Nothing is written before they have ended."""
    expected = digests(mpmd.to_host(state))
    stepped = threading.Event()
    runtime = state["count"].runtime
    ask = runtime.ask

    def held_up(requests):
        if any(isinstance(request, Write) for request in requests.values()):
            stepped.wait(60)
        return ask(requests)

    monkeypatch.setattr(runtime, "ask", held_up)
    saving = mpmd.save_async(tmp_path / "saved", state)
    for _ in range(3):
        state, _ = step(state, tokens())
    jax.block_until_ready(state)
    stepped.set()
    saving.result()
    assert digests(mpmd.to_host(step.restore(tmp_path / "saved"))) == expected


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks(code, tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(reservation.fcntl, "flock", flock)
    mpmd.save(tmp_path / "saved", {"weight": np.ones(3)})
    np.testing.assert_array_equal(mpmd.restore(tmp_path / "saved", {"weight": np.zeros(3)})["weight"], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_saving_waits_for_the_steps_before_and_not_for_those_after(step, state, tmp_path, monkeypatch):
    """The copy is asked for before ``save_async`` returns, and a group answers in order."""
    noted = note_requests(monkeypatch, state["count"].runtime)
    state, _ = step(state, tokens())
    saving = mpmd.save_async(tmp_path / "saved", state)
    step(state, tokens())
    saving.result()
    asked = [type(next(iter(requests.values()))) for requests in noted]
    assert [kind for kind in asked if kind is not Write] == [StepRequest, CopyOut, CopyOut, StepRequest]


def test_a_relative_path(state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mpmd.save("saved", state)
    assert (tmp_path / "saved" / "_METADATA").exists()


def test_a_manager_saves_keeps_the_last_ones_and_restores(mesh, step, state, tmp_path):
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    handler = mpmd.checkpoint.handler()
    with ocp.CheckpointManager(tmp_path, item_handlers=handler, options=options) as manager:
        for number in range(3):
            manager.save(number, args=ocp.args.PyTreeSave(state))
            expected = digests(mpmd.to_host(state))
            state, _ = step(state, tokens())
        manager.wait_until_finished()
        assert (manager.all_steps(), manager.latest_step()) == ([1, 2], 2)
        target = mpmd.checkpoint.restore_args(step.argument_leaves(), mesh)
        restored = manager.restore(2, args=target)
    assert digests(mpmd.to_host(restored)) == expected
    assert isinstance(restored["count"], mpmd.MpmdArray)


def test_groups_keep_no_copy(step, state, tmp_path):
    runtime = state["count"].runtime
    mpmd.save(tmp_path / "saved", state)
    assert not any(group.worker._copies for group in runtime._groups)
