"""Every failure names its group, and ends all waiting for it."""

import gc
import itertools
import os
import queue
import signal
import types
import weakref

import jax.numpy as jnp
import pytest
import ray

import cluster
import mpmd
import mpmd.errors
from cluster.transports.inbox import ProcessInbox
from cluster.transports.object_store import ObjectStoreTransport
from mpmd.runtime.transport import MessageId
from tests.ray.conftest import launch
from tests.ray.hand_written_programs import (
    allocate_too_much,
    compute_forever,
    relay_program,
    relaying,
    wait_until_relaying,
)
from tests.support.models import batch, init, make_step, mse, weights

SECONDS = 60
SOON = 15
"""Seconds within which a failure ends all waiting for the group."""


def outcome(future, seconds=SOON):
    """The exception of a future."""
    with pytest.raises(Exception) as caught:  # of any type, which the test checks
        future.result(seconds)
    return caught.value


@pytest.fixture
def disposable_mesh(local_ray):
    """A mesh of two groups, which the test may kill."""
    with launch() as mesh:
        yield mesh


def test_a_failing_task_is_named_and_the_others_are_unblocked(two_groups):
    runtime = two_groups.runtime
    failing = relaying(two_groups, allocate_too_much)
    working = relaying(two_groups)
    futures, outputs = failing.step()
    queued, _ = working.step()

    error = outcome(futures[0])
    assert type(error) is mpmd.errors.TaskError
    assert (error.mpmd_idx, error.label) == (0, "fwd_0__0")
    assert "fwd_0__0 failed on group 0" in str(error)
    assert "RESOURCE_EXHAUSTED" in str(error)
    assert "executor.py" in str(error.__cause__)  # the traceback of the group's process

    other = outcome(futures[1])
    assert type(other) is mpmd.errors.StepAborted
    assert "fwd_0__0 failed on group 0" in str(other)

    for future in queued.values():
        future.result(SOON)
    lost = outcome(runtime.fetch(1, outputs["z"]))
    assert "lost" in str(lost)
    assert "fwd_0__0 failed on group 0" in str(lost)

    again, outputs = working.step()
    assert again[0].result(SOON).inline[outputs["end"]] == 4


def test_a_program_that_does_not_compile_names_the_group(two_groups):
    program = relay_program()
    with pytest.raises(mpmd.errors.TaskError, match="loading the program failed on group 0") as caught:
        broken = {"work": b"not an export", "next": b"neither"}
        shipment = cluster.protocol.shipment.Shipment(program.plan, broken, {}, {})
        two_groups.runtime._calls.call_ray(0, "ship", 99, shipment).result(SECONDS)
        two_groups.runtime._calls.ask(0, cluster.protocol.shipment.Load(99)).result(SECONDS)
    assert caught.value.mpmd_idx == 0


@pytest.mark.usual("before-two_groups")
@pytest.mark.parametrize("mesh", ["two_groups", "two_process_groups"])
@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
def test_an_interrupt_between_requests_leaves_no_group_waiting(mesh, sent, monkeypatch, request):
    """It comes before or after the second request is sent: to another group, or in the same one."""
    mesh = request.getfixturevalue(mesh)
    driver = relaying(mesh)
    send, calls = cluster.tcp.rpc.Client.send, itertools.count()

    def interrupted(client, frame):
        interrupt = next(calls) == 1
        if sent or not interrupt:
            send(client, frame)
        if interrupt:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cluster.tcp.rpc.Client, "send", interrupted)
        driver.step()
    futures, outputs = driver.step()
    assert futures[0].result(SOON).inline[outputs["end"]] == 4


@pytest.mark.slow
def test_an_unresponsive_actor_is_named(disposable_mesh, monkeypatch):
    monkeypatch.setattr(cluster.driver.calls.liveness, "PING_SECONDS", 1)
    monkeypatch.setattr(cluster.driver.calls.liveness, "UNRESPONSIVE_SECONDS", 4)
    driver = relaying(disposable_mesh)
    os.kill(disposable_mesh.groups[0].pid, signal.SIGSTOP)
    try:
        # No step is needed for it: whatever is waited for.
        error = outcome(disposable_mesh.runtime.fetch(0, driver.handles["x"]), 2 * SOON)
        assert (type(error), error.mpmd_idx) == (mpmd.errors.GroupDiedError, 0)
        assert "group 0 is stuck: its process has not answered for" in str(error)
        with pytest.raises(mpmd.errors.GroupDiedError, match="group 0 is stuck"):
            disposable_mesh.runtime.load(relay_program())
    finally:
        os.kill(disposable_mesh.groups[0].pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_task_that_never_ends_is_named_and_its_group_ended(local_ray, monkeypatch):
    monkeypatch.setattr(cluster.driver.calls.liveness, "LEAVE_SECONDS", 1)
    with launch(step_timeout=2) as mesh:
        driver = relaying(mesh, compute_forever)
        futures, _ = driver.step()
        wait_until_relaying(mesh)
        assert mesh.status().processes[0].pending == 1
        errors = [outcome(futures[i], 2 * SOON) for i in range(2)]
        assert [type(error) for error in errors] == [
            mpmd.errors.GroupStuckError,  # nothing can interrupt its task
            mpmd.errors.StepTimeoutError,  # it has left the step
        ]
        for error in errors:
            assert "group 0: running fwd_0__0 in step" in str(error)
            assert "group 1: waiting for message 0 of group 0 in step" in str(error)
        zero, one = mesh.status().processes
        assert zero.state.startswith("dead: group 0 is stuck") and one.state.startswith("idle")
    assert [process.state for process in mesh.status().processes] == ["closed", "closed"]
    assert str(mesh.groups[1].pid) in str(mesh.status())


@pytest.mark.slow
def test_close_fails_pending_calls(disposable_mesh):
    runtime = disposable_mesh.runtime
    driver = relaying(disposable_mesh, compute_forever)
    futures, _ = driver.step()
    disposable_mesh.close()
    disposable_mesh.close()
    later, _ = driver.step()
    for future in [*futures.values(), *later.values(), runtime.fetch(0, 0)]:
        with pytest.raises(RuntimeError, match="closed"):
            future.result(SOON)
    with pytest.raises(RuntimeError, match="closed"):
        runtime.load(relay_program())
    runtime.free((0, 1), driver.handles["x"])  # as the garbage collector may
    with pytest.raises(RuntimeError, match="the mesh was closed; launch another one"):
        disposable_mesh.runtime  # noqa: B018


@pytest.mark.slow
def test_a_closed_mesh_keeps_nothing_of_its_steps(disposable_mesh):
    step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mpmd_mesh=disposable_mesh)
    loaded = step.compile(init(weights(2)), *batch())
    step(init(weights(2)), *batch())
    runtime = weakref.ref(disposable_mesh.runtime)
    disposable_mesh.close()
    gc.collect()
    assert runtime() is None
    assert not step._loaded
    with pytest.raises(RuntimeError, match="the mesh was closed, and the step was unloaded"):
        loaded(init(weights(2)), *batch())
    with pytest.raises(RuntimeError, match="the mesh was closed; launch another one"):
        step(init(weights(2)), *batch())


@pytest.mark.slow
def test_a_message_that_does_not_arrive_aborts_its_receiver(local_ray):
    @ray.remote
    def lose():
        raise OSError("the network is gone")

    class Peer:
        def __init__(self):
            self.aborted = queue.SimpleQueue()
            self.deliver = types.SimpleNamespace(remote=lambda message, packed: lose.remote())
            self.abort = types.SimpleNamespace(remote=lambda step, reason: self.aborted.put((step, reason)))

    peer, transport = Peer(), ObjectStoreTransport(ProcessInbox())
    senders = transport.connect({1: peer})
    senders[1].send(MessageId(step=5, src=0, dst=1, tag=2), [jnp.ones(3)])
    step, reason = peer.aborted.get(timeout=SOON)
    assert step == 5
    assert reason.startswith("message 2 of group 0 did not arrive")
    assert "the network is gone" in reason
    transport.close()
