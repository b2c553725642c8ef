"""Every failure names its group, and ends all waiting for it."""

import itertools
import queue
import types

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
    compute_forever,
    relay_program,
    relaying,
    wait_until_relaying,
)

SECONDS = 60
SOON = 15
"""Seconds within which a failure ends all waiting for the group."""


def outcome(future, seconds=SOON):
    """The exception of a future."""
    with pytest.raises(Exception) as caught:  # of any type, which the test checks
        future.result(seconds)
    return caught.value


def test_a_program_that_does_not_compile_names_the_group(two_groups):
    program = relay_program()
    with pytest.raises(mpmd.errors.TaskError, match="loading the program failed on group 0") as caught:
        broken = {"work": b"not an export", "next": b"neither"}
        shipment = cluster.protocol.shipment.Shipment(program.plan, broken, {}, {})
        two_groups.runtime._calls.call_ray(0, "ship", 99, shipment).result(SECONDS)
        two_groups.runtime._calls.ask(0, cluster.protocol.shipment.Load(99)).result(SECONDS)
    assert caught.value.mpmd_idx == 0


@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
def test_an_interrupt_between_requests_leaves_no_group_waiting(two_groups, sent, monkeypatch):
    """The interrupt comes right before or right after the driver sends the second request."""
    driver = relaying(two_groups)
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
    senders = transport.connect({1: peer}, {})
    senders[1].send(MessageId(step=5, src=0, dst=1, tag=2), [jnp.ones(3)])
    step, reason = peer.aborted.get(timeout=SOON)
    assert step == 5
    assert reason.startswith("message 2 of group 0 did not arrive")
    assert "the network is gone" in reason
    transport.close()
