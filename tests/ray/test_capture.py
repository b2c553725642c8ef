"""Tasks captured on Ray: of groups of several processes, of stacked layers, and of groups that recover."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cluster
import mpmd
from mpmd.errors import NonFiniteError
from mpmd.replay import load
from tests.ray.conftest import launch
from tests.support.only_jax import ROOT

LAYERS, WIDTH, ROWS = 4, 4, 8


def layer(h, p):
    h = jnp.tanh(h @ p["w"])
    return h * jnp.sqrt(p["t"])  # planted


def step(params, x, y):
    def loss_fn(params, x, y):
        def body(h, p):
            return mpmd.mark_stage_end(layer(h, p), num_stages=2), None

        return jnp.mean((jax.lax.scan(body, x, params)[0] - y) ** 2)

    loss, grads = mpmd.treduce(
        lambda mb: jax.value_and_grad(loss_fn)(params, *mb),
        mpmd.microbatches((x, y), 2),
        schedule=mpmd.Std1F1B(2),
        operation=mpmd.Mean,
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments(scale=1.0):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32)
    scales = np.ones((LAYERS, WIDTH), np.float32)
    scales[3] *= scale
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"w": weights, "t": scales}, x, np.tanh(x)


def replay(directory):
    """The replay in a process with the environment of the group's."""
    command = [sys.executable, "-m", "mpmd", "replay", str(directory), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_task_of_two_processes(two_process_groups, tmp_path):
    specs = (P(), P("fsdp"), P("fsdp"))
    compiled = mpmd.jit(step, two_process_groups, specs, donate_argnums=0).compile(*arguments())
    state, loss = compiled.capture(*arguments(), task="bwd_1__1", to=tmp_path / "task")
    other, plain = compiled(*arguments())
    assert float(loss) == float(plain)
    np.testing.assert_array_equal(mpmd.to_host(state)["w"], mpmd.to_host(other)["w"])
    captured = load(tmp_path / "task")
    assert captured.record.num_devices == 2 and "NPROC" in captured.record.environment
    assert any(array.shape == (ROWS // 2, WIDTH) for array in captured.inputs.values())
    result = replay(tmp_path / "task")
    assert result["differences"] == [] and result["evaluation"] is None and not result["not_run"]


@pytest.mark.slow
def test_a_nan_of_groups_that_recover(local_ray, tmp_path):
    with launch(capture=tmp_path, recovery=cluster.Recovery(every=2)) as mesh:
        compiled = mpmd.jit(step, mesh, donate_argnums=0).compile(*arguments())
        state, loss = compiled(*arguments())
        assert np.isfinite(float(loss)) and list(tmp_path.iterdir()) == []
        with jax.debug_nans(True), pytest.raises(NonFiniteError) as raised:
            float(compiled(*arguments(scale=-1.0))[1])
        (directory,) = tmp_path.iterdir()
        assert str(directory) in raised.value.__notes__[0]
        _, after = compiled(state, *arguments()[1:])  # the groups go on
        assert np.isfinite(float(after))
    result = replay(directory)
    evaluation = result["evaluation"]
    assert result["differences"] == [] and evaluation["reaches_result"]
    lines = Path(__file__).read_text().splitlines()
    (line,) = (i for i, text in enumerate(lines, 1) if text.endswith("  # planted"))
    assert f"test_capture.py:{line} (layer)" in evaluation["first"]["source"]["line"]
    assert evaluation["first"]["path"][1] == "iteration 1 of 2"
