"""Metrics of a run on Ray, and the table of a run that another process looks at."""

import json
import os
import subprocess
import sys
import time

import jax
import pytest
import ray

import cluster
import mpmd
from mpmd.cli.exit_codes import ExitCode
from tests.support.models import batch, init, make_step, mse, weights

SECONDS = 60
TRAIN_STEP = make_step(mse, mpmd.Std1F1B(2))


def train(step, state, steps):
    for _ in range(steps):
        state, _ = step(state, *batch())
    return state


@pytest.mark.usual("two_groups")
@pytest.mark.parametrize("groups", ["two_groups", "two_process_groups"])
def test_metrics_of_each_step(request, groups):
    step, written = mpmd.jit(TRAIN_STEP, request.getfixturevalue(groups)), []
    with mpmd.metrics(step, lambda *each: written.append(each), examples=16):
        train(step, init(weights(2)), 5)
    assert [number for number, _ in written] == [0, 1, 2, 3, 4]
    for _, values in written:
        assert values["step_seconds"] > 0 and values["bytes_sent"] > 0
        assert values["host_memory_bytes"] > 2**20 and values["recoveries"] == 0


def top(*options):
    """The output of ``mpmd top``, and its exit code."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-P", "-m", "mpmd", "top", "--once", "--address", address, *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    assert done.returncode in (ExitCode.OK, ExitCode.FAULT), done.stderr
    return done.stdout, done.returncode


def runs():
    shown = json.loads(top("--json")[0])["runs"]
    return {tuple(process["pid"] for process in run["processes"]): run for run in shown}


@pytest.mark.slow
def test_a_run_with_a_recovery_is_seen_by_itself_and_from_outside(local_ray):
    recovery = cluster.Recovery(every=2)
    with cluster.launch(
        {"stage": 2}, "stage", cpus_per_group=0.25, recovery=recovery, timeout=SECONDS
    ) as mesh:
        step, written = mpmd.jit(TRAIN_STEP, mesh), []
        with mpmd.metrics(step, lambda *each: written.append(each)):
            state = jax.block_until_ready(train(step, init(weights(2)), 3))
            ray.kill(mesh.runtime.actors[1])
            state = jax.block_until_ready(train(step, state, 2))
            end = time.monotonic() + SECONDS
            while not mesh.recoveries:  # it is reported when the steps that it repeats are answered
                assert time.monotonic() < end
                time.sleep(0.05)
            state = jax.block_until_ready(train(step, state, 1))
        assert [number for number, _ in written] == list(range(6))
        assert written[0][1]["recoveries"] == 0 and written[-1][1]["recoveries"] == 1
        assert written[-1][1]["recovery_seconds"] == pytest.approx(sum(mesh.recovery_seconds))
        pids = tuple(process.pid for process in mesh.processes)
        seen = runs()[pids]
        assert seen["answered"] and (seen["recoveries"], seen["pid"]) == (1, os.getpid())
        assert [(each["name"], each["ended"]) for each in seen["functions"]] == [("step", 6)]
        assert all(process["state"].startswith("idle") for process in seen["processes"])
    assert pids not in runs()


@pytest.mark.slow
def test_a_mesh_that_is_dropped_is_not_shown(local_ray):
    mesh = cluster.launch({"stage": 1}, "stage", cpus_per_group=0.25, timeout=SECONDS)
    (pid,) = [process.pid for process in mesh.processes]
    assert (pid,) in runs()
    del mesh
    end = time.monotonic() + SECONDS
    while (pid,) in runs():
        assert time.monotonic() < end
