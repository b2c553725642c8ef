"""Whatever goes wrong, it is said where, and nobody waits for ever."""

import os
import queue
import signal
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

import cluster
import mpmd.errors
from cluster.transports.inbox import Inbox
from cluster.transports.object_store import ObjectStoreTransport
from mpmd.runtime.transport import MessageId
from tests.ray.hand_written import (
    TRAIN_FEEDBACK,
    Driver,
    echo_program,
    relay_program,
    train_program,
    train_values,
)

SECONDS = 60
SOON = 15
"""Within this, seconds, a failure has reached everybody who waits for the group."""


def allocate_too_much(x):
    # A loop carries it, so it has to be there.
    return (jax.lax.while_loop(lambda y: y[7, 7] < 0, jnp.sin, jnp.zeros((2**24, 2**23)) + x)[7, 7],)


def compute_for_ever(x):
    return (jax.lax.while_loop(lambda y: y < 2, jnp.sin, x),)


def add_one(x):
    return (x + 1,)


def outcome(future, seconds=SOON):
    """What a future raises."""
    with pytest.raises(Exception) as caught:  # whatever it is, the test looks at it
        future.result(seconds)
    return caught.value


@pytest.fixture
def doomed(local_ray):
    """Two groups that the test may kill."""
    with cluster.launch({"stage": 2}, "stage", cpus_per_group=0.25) as mesh:
        yield mesh


def test_a_failing_task_is_named_and_the_others_are_unblocked(two_groups):
    runtime = two_groups.runtime
    failing = Driver(runtime, relay_program(allocate_too_much), {"x": np.float32(1)})
    working = Driver(runtime, relay_program(add_one), {"x": np.float32(1)})
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


def test_a_step_queued_behind_a_failed_one_fails_for_the_same_reason(two_groups):
    program = relay_program(allocate_too_much)
    driver = Driver(two_groups.runtime, program, {"x": np.float32(1)}, {"end": "x"})
    driver.step()
    futures, _ = driver.step()
    assert "fwd_0__0 failed on group 0" in str(outcome(futures[0]))
    assert "fwd_0__0 failed on group 0" in str(outcome(futures[1]))


def test_a_program_that_does_not_compile_names_the_group(two_groups):
    program = relay_program(add_one)
    with pytest.raises(mpmd.errors.TaskError, match="loading the program failed on group 0") as caught:
        broken = {"work": b"not an export", "next": b"neither"}
        shipment = cluster.worker.Shipment(program.plan, broken, {}, False)
        two_groups.runtime._groups.call_ray(0, "ship", 99, shipment).result(SECONDS)
        two_groups.runtime._groups.call(0, "load", 99).result(SECONDS)
    assert caught.value.mpmd_idx == 0


def test_a_step_whose_arguments_cannot_travel_does_not_hang_the_others(two_groups):
    driver = Driver(two_groups.runtime, relay_program(add_one), {"x": np.float32(1)})
    driver.unsent["x"] = np.array([threading.Lock()], dtype=object)  # a lock does not pickle
    futures, _ = driver.step()
    assert isinstance(outcome(futures[0]), TypeError)
    assert isinstance(outcome(futures[1]), mpmd.errors.StepAborted)


def test_an_interrupt_between_requests_leaves_no_group_waiting(two_groups, monkeypatch):
    driver = Driver(two_groups.runtime, relay_program(add_one), {"x": np.float32(1)})
    calls = iter([cluster.groups.frame])

    def interrupted(*message):
        for call in calls:
            return call(*message)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cluster.groups, "frame", interrupted)
        driver.step()
    futures, outputs = driver.step()
    assert futures[0].result(SOON).inline[outputs["end"]] == 4


@pytest.mark.parametrize("victim", [0, 1], ids=["computing", "waiting"])
def test_an_actor_killed_in_a_step_is_named_at_once(doomed, victim):
    driver = Driver(doomed.runtime, relay_program(compute_for_ever), {"x": np.float32(1)})
    steps = [driver.step() for _ in range(3)]
    fetch = doomed.runtime.fetch(victim, driver.handles["x"])
    time.sleep(1)
    start = time.monotonic()
    ray.kill(doomed.runtime.actors[victim])
    for future in [fetch, *(future for futures, _ in steps for future in futures.values())]:
        error = outcome(future)
        assert (type(error), error.mpmd_idx) == (mpmd.errors.GroupDiedError, victim)
        assert f"group {victim} died" in str(error)
        assert "ray.kill" in str(error)
    later, _ = driver.step()
    for future in [*later.values(), doomed.runtime.fetch(victim, driver.handles["x"])]:
        error = outcome(future)
        assert (type(error), error.mpmd_idx) == (mpmd.errors.GroupDiedError, victim)
    assert time.monotonic() - start < SOON


def test_an_actor_that_dies_between_steps_is_noticed(doomed):
    program, values = echo_program([np.ones(4, "float32")])
    driver = Driver(doomed.runtime, program, values)
    futures, outputs = driver.step()
    for future in futures.values():
        future.result(SECONDS)
    os.kill(doomed.groups[0].pid, signal.SIGKILL)
    futures, _ = driver.step()
    assert type(outcome(futures[0])) is mpmd.errors.GroupDiedError
    assert type(outcome(futures[1])) is mpmd.errors.GroupDiedError
    np.testing.assert_array_equal(doomed.runtime.fetch(1, outputs["v0"]).result(SOON), values["v0"])


def test_an_actor_that_is_stuck_is_named(doomed, monkeypatch):
    monkeypatch.setattr(cluster.groups, "_PING_SECONDS", 1)
    monkeypatch.setattr(cluster.groups, "_STUCK_SECONDS", 4)
    driver = Driver(doomed.runtime, relay_program(add_one), {"x": np.float32(1)})
    os.kill(doomed.groups[0].pid, signal.SIGSTOP)
    try:
        futures, _ = driver.step()
        for future in futures.values():
            error = outcome(future, 2 * SOON)
            assert (type(error), error.mpmd_idx) == (mpmd.errors.GroupDiedError, 0)
            assert "group 0 is stuck: its process has not answered for" in str(error)
    finally:
        os.kill(doomed.groups[0].pid, signal.SIGKILL)


def test_a_group_whose_connection_to_the_driver_breaks_is_named(doomed, monkeypatch):
    monkeypatch.setattr(cluster.groups, "_PATIENCE_SECONDS", 1)
    driver = Driver(doomed.runtime, relay_program(compute_for_ever), {"x": np.float32(1)})
    futures, _ = driver.step()
    doomed.runtime._groups._clients[0].end()
    for future in [*futures.values(), doomed.runtime.fetch(0, driver.handles["x"])]:
        error = outcome(future)
        assert (type(error), error.mpmd_idx) == (mpmd.errors.GroupDiedError, 0)
        assert "group 0 is gone: its connection to the driver has ended" in str(error)


def test_loading_on_a_dead_group_says_so(doomed):
    ray.kill(doomed.runtime.actors[1])
    with pytest.raises(mpmd.errors.GroupDiedError, match="group 1 died"):
        doomed.runtime.load(relay_program(add_one))


def test_close_fails_what_is_outstanding(doomed):
    driver = Driver(doomed.runtime, relay_program(compute_for_ever), {"x": np.float32(1)})
    futures, _ = driver.step()
    doomed.close()
    doomed.close()
    later, _ = driver.step()
    for future in [*futures.values(), *later.values(), doomed.runtime.fetch(0, 0)]:
        with pytest.raises(RuntimeError, match="closed"):
            future.result(SOON)
    with pytest.raises(RuntimeError, match="closed"):
        doomed.runtime.load(relay_program(add_one))
    doomed.runtime.free((0, 1), driver.handles["x"])  # from garbage collection, at any later time


def test_a_message_that_does_not_arrive_aborts_its_receiver(local_ray):
    @ray.remote
    def lose():
        raise OSError("the network is gone")

    class Peer:
        def __init__(self):
            self.aborted = queue.SimpleQueue()
            self.deliver = types.SimpleNamespace(remote=lambda message, packed: lose.remote())
            self.abort = types.SimpleNamespace(remote=lambda step, reason: self.aborted.put((step, reason)))

    peer, transport = Peer(), ObjectStoreTransport(Inbox())
    transport.connect({1: peer})
    transport.send(MessageId(step=5, src=0, dst=1, tag=2), [jnp.ones(3)])
    step, reason = peer.aborted.get(timeout=SOON)
    assert step == 5
    assert reason.startswith("message 2 of group 0 did not arrive")
    assert "the network is gone" in reason
    transport.close()


def test_training_goes_on_after_an_aborted_step(two_groups):
    driver = Driver(two_groups.runtime, train_program(), train_values(), TRAIN_FEEDBACK)
    driver.step()
    failing = Driver(two_groups.runtime, relay_program(allocate_too_much), {"x": np.float32(1)})
    failing.step()
    futures, outputs = driver.step()
    assert np.isfinite(futures[1].result(SOON).inline[outputs["t1"]])
