"""Tasks captured on Ray: of groups of several processes, and of groups that recover."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cluster
import mpmd
from mpmd.errors import NonFiniteError
from mpmd.replay import load
from tests.ray.conftest import launch
from tests.support.captured_tasks import ROWS, WIDTH, arguments, small_step
from tests.support.only_jax import ROOT


def replay(directory):
    """The replay in a process with the environment of the group's."""
    command = [sys.executable, "-m", "mpmd", "replay", str(directory), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_task_of_two_processes(two_process_groups, tmp_path):
    specs = (P(), P(), P("fsdp"), P("fsdp"))
    compiled = mpmd.jit(small_step, two_process_groups, specs, donate_argnums=0).compile(*arguments())
    state, loss = compiled.capture(*arguments(), task="bwd_1__1", to=tmp_path / "task")
    other, plain = compiled(*arguments())
    assert float(loss) == float(plain)
    jax.tree.map(np.testing.assert_array_equal, mpmd.to_host(state), mpmd.to_host(other))
    captured = load(tmp_path / "task")
    assert captured.record.num_devices == 2 and "NPROC" in captured.record.environment
    assert any(array.shape == (ROWS // 2, WIDTH) for array in captured.inputs.values())
    result = replay(tmp_path / "task")
    assert result["differences"] == [] and result["evaluation"] is None and not result["not_run"]


@pytest.mark.slow
def test_a_nan_of_groups_that_recover(local_ray, tmp_path):
    """The step returns the donated state unchanged, bit for bit, and no process is replaced."""
    with launch(capture=tmp_path, recovery=cluster.Recovery(every=2)) as mesh:
        compiled = mpmd.jit(small_step, mesh, donate_argnums=0).compile(*arguments())
        (state, _), (_, key, x, y) = compiled(*arguments()), arguments()
        before, pids = mpmd.to_host(state), [group.pid for group in mesh.groups]
        assert list(tmp_path.iterdir()) == []
        with jax.debug_nans(True), pytest.raises(NonFiniteError) as raised:
            float(compiled(state, key, np.full_like(x, np.nan), y)[1])
        (directory,) = tmp_path.iterdir()
        assert str(directory) in raised.value.__notes__[0]
        jax.tree.map(np.testing.assert_array_equal, mpmd.to_host(state), before)
        assert np.isfinite(float(compiled(state, key, x, y)[1]))  # the groups go on
        assert [group.pid for group in mesh.groups] == pids
    result = replay(directory)
    assert result["differences"] == [] and result["nonfinite_inputs"]
