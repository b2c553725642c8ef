"""What the groups of a process are doing."""

import threading

import mpmd
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of

SECONDS = 60


def test_before_the_first_step_no_group_is_started():
    mesh = mesh_of(2)
    assert [group.state for group in mesh.status().groups] == ["not started"] * 2
    assert "runtime" not in vars(mesh)


def test_a_group_that_is_busy_says_with_what_and_how_many_calls_wait():
    with mesh_of(2) as mesh:
        mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh)(init(weights(2)), *batch())
        group, entered, leave = mesh.runtime._groups[1], threading.Event(), threading.Event()

        def call():
            with group.worker.activity.during("testing", 7):
                entered.set()
                assert leave.wait(SECONDS)

        group.submit(call)
        assert entered.wait(SECONDS)
        last = group.submit(lambda: None)
        status = mesh.status()
        assert status.groups[1].state.startswith("testing in step 7 for ") and status.groups[1].pending == 1
        header, *rows = str(status).splitlines()
        assert header.split() == ["group", "devices", "pending", "state"]
        assert (
            len(rows) == 2
            and "testing in step 7" in rows[1]
            and str(mesh.unstack[1].devices.flat[0]) in rows[1]
        )
        leave.set()
        last.result(SECONDS)
