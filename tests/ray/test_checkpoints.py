"""Processes of groups write and read checkpoints, and may die while they do."""

import os
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import mpmd
from mpmd.runtime.requests import Write
from tests.ray.conftest import launch
from tests.support.checkpoint_state import compiled, initial_state, tokens
from tests.support.digests import digests

SECONDS = 60


@pytest.mark.slow
def test_processes_write_their_shards_and_other_groups_read_them(two_process_groups, four_groups, tmp_path):
    step = compiled(two_process_groups, mpmd.Std1F1B(2), sharded=True)
    state, _ = step(initial_state(), tokens())
    expected = digests(mpmd.to_host(state))
    saving = mpmd.save_async(tmp_path / "saved", {"state": state, "epoch": 3})
    state, loss = step(state, tokens())  # which takes over what is being saved
    saving.result()
    writers = {path.name for path in (tmp_path / "saved").glob("ocdbt.process_g*")}
    # All that group 1 writes is replicated: its first process has it.
    assert writers == {"ocdbt.process_g0p0", "ocdbt.process_g0p1", "ocdbt.process_g1p0"}

    target = {"state": step.argument_leaves(), "epoch": 0}
    again = mpmd.restore(tmp_path / "saved", target, two_process_groups)
    assert again["epoch"] == 3
    assert digests(mpmd.to_host(again["state"])) == expected
    assert float(step(again["state"], tokens())[1]) == float(loss)

    elsewhere = compiled(four_groups, mpmd.Eager1F1B(4))
    target["state"] = elsewhere.argument_leaves()
    restored = mpmd.restore(tmp_path / "saved", target, four_groups)["state"]
    assert digests(mpmd.to_host(restored)) == expected
    np.testing.assert_allclose(float(elsewhere(restored, tokens())[1]), float(loss), rtol=1e-5)


@pytest.mark.slow
def test_a_group_that_dies_while_it_writes(local_ray, tmp_path, monkeypatch):
    """What it leaves is not restored, and the next manager removes it."""

    def total(xs):
        return mpmd.treduce(mpmd.mark_stage_end, xs, mpmd.ForwardOnly(2, 2), operation=mpmd.Add)

    handler = mpmd.checkpoint.handler()
    with launch() as mesh:
        array = mpmd.jit(total, mesh)(jax.random.normal(jax.random.key(0), (2, 1000)))
        expected, (group,) = np.asarray(array), array.mpmd_idxs
        (process,) = [process for process in mesh.processes if process.mpmd_idx == group]
        with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
            manager.save(0, args=ocp.args.PyTreeSave({"array": array}))
            manager.wait_until_finished()
            ask = mesh.runtime.ask

            def dying(requests):
                if any(isinstance(request, Write) for request in requests.values()):
                    os.kill(process.pid, signal.SIGKILL)
                return ask(requests)

            with monkeypatch.context() as patched:
                patched.setattr(mesh.runtime, "ask", dying)
                manager.save(1, args=ocp.args.PyTreeSave({"array": array}))
                with pytest.raises(mpmd.GroupDiedError, match=f"group {group} died") as caught:
                    manager.wait_until_finished()
            assert str(tmp_path / "1") in caught.value.__notes__[0]
            assert manager.latest_step() == 0
    assert "1.orbax-checkpoint-tmp" in os.listdir(tmp_path)
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        restored = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())
        manager.save(1, args=ocp.args.StandardSave(restored))
    np.testing.assert_array_equal(restored["array"], expected)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
