"""What the groups of a process are doing."""

import threading
import time

import jax
import numpy as np

import mpmd
from mpmd.runtime.activity import ActivityKind
from tests.support.parity import mesh_of

SECONDS = 60


def test_before_the_first_step_no_group_is_started():
    mesh = mesh_of(2)
    assert [group.state for group in mesh.status().groups] == ["not started"] * 2
    assert "runtime" not in vars(mesh)


def test_a_group_says_which_task_it_runs_or_what_it_waits_for_and_how_many_calls_wait(mesh):
    """The status is read within the first task of the first step; a second step waits."""
    zero, one = (group.worker.activity for group in mesh.runtime._groups)
    seen, submitted = [], threading.Event()

    def look(x):
        assert submitted.wait(SECONDS)
        while not seen and not one.read().what.startswith("waiting for message"):
            time.sleep(0.01)
        seen.append((zero.read(), one.read(), mesh.status()))
        return x

    def loss(params, x, y):
        x = jax.pure_callback(look, x, x)
        x = mpmd.mark_stage_end(x @ params[0])
        return ((x @ params[1] - y) ** 2).mean()

    def train_step(params, xs, ys):
        return mpmd.treduce(
            lambda mb: loss(params, *mb), (xs, ys), schedule=mpmd.ForwardOnly(2, 2), operation=mpmd.Add
        )

    step = mpmd.jit(train_step, mpmd_mesh=mesh)
    x = np.ones((1, 2, 2), "float32")
    results = [step([x[0], x[0]], x, x) for _ in range(2)]
    submitted.set()
    jax.block_until_ready(results)
    task, wait, status = seen[0]
    assert (task.what, task.kind) == ("running fwd_0__0", ActivityKind.TASK)
    assert (wait.what, wait.kind) == ("waiting for message 0 of group 0", ActivityKind.OTHER)
    assert task.step == wait.step is not None
    assert [group.pending for group in status.groups] == [1, 1]
    header, *rows = str(status).splitlines()
    assert header.split() == ["group", "devices", "pending", "state"]
    assert "running fwd_0__0 in step" in rows[0] and "waiting for message 0 of group 0 in step" in rows[1]
    assert all(str(mesh.unstack[i].devices.flat[0]) in row for i, row in enumerate(rows))
