"""Transports that are connected with one another within this process."""

import contextlib
import os
import queue
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from cluster.tcp.credentials import make_credentials
from cluster.transports import inbox as inbox_module
from cluster.transports.router import Router
from mpmd.errors import StepAborted
from mpmd.runtime.transport import MessageId
from tests.support.processes import endpoints

WITHOUT_RAY = ["shared_memory", "network", "device"]
"""Transports that need no Ray."""


def connected(name):
    """The routers of two groups of this process, connected by the named transport."""
    submeshes = [jax.sharding.Mesh(np.array(jax.devices()[i : i + 1]), ("stage",)) for i in range(2)]
    ends = [Router(*each) for each in zip(endpoints([1, 1]), submeshes, strict=True)]
    connect(ends, name)
    return ends


def connect(ends, name):
    credentials = make_credentials(encryption=True)
    addresses = [router.listen([name], "127.0.0.1", credentials) for router in ends]
    threads = [
        threading.Thread(target=router.connect, args=({1 - i: name}, addresses))
        for i, router in enumerate(ends)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


@pytest.mark.parametrize("name", WITHOUT_RAY)
def test_a_group_that_closes_is_gone_for_its_peers(monkeypatch, name):
    monkeypatch.setattr(inbox_module, "ABORT_REASON_SECONDS", 0.1)
    ends = connected(name)
    message, other = MessageId(0, 0, 1, 0), MessageId(0, 0, 1, 1)
    ends[0].send(message, [np.arange(70_000)])
    wanted = [jax.sharding.SingleDeviceSharding(jax.devices()[1])]
    np.testing.assert_array_equal(ends[1].recv(message, wanted)[0], np.arange(70_000))
    ends[0].close()
    with pytest.raises(StepAborted, match="group 0 is gone"):
        ends[1].recv(other, wanted)
    with pytest.raises(StepAborted, match="group 0 is gone"):
        ends[1].send(MessageId(0, 1, 0, 0), [np.arange(70_000)])
    ends[1].close()


@pytest.mark.parametrize("name", WITHOUT_RAY)
def test_a_message_has_arrived_before_the_receiver_looks(name):
    ends = connected(name)
    wanted = [jax.sharding.SingleDeviceSharding(jax.devices()[1])]
    for tag in range(2):
        before = time.perf_counter_ns()
        ends[0].send(MessageId(0, 0, 1, tag), [np.arange(1000)])
        time.sleep(0.3)
        looked = time.perf_counter_ns()
        ends[1].recv(MessageId(0, 0, 1, tag), wanted)
        assert before <= ends[1].arrived < looked
    for router in ends:
        router.close()


@pytest.mark.parametrize("name", WITHOUT_RAY)
def test_a_group_that_dies_before_it_has_received_is_gone_too(monkeypatch, name):
    monkeypatch.setattr(inbox_module, "ABORT_REASON_SECONDS", 0.1)
    ends = connected(name)
    for tag in range(3):
        ends[0].send(MessageId(0, 0, 1, tag), [np.arange(1000 * (tag + 1))])
    ends[1].close()
    with pytest.raises(StepAborted, match="group 1 is gone"):
        for tag in range(3, 1000):  # what is sent before the end is noticed, is lost
            ends[0].send(MessageId(0, 0, 1, tag), [np.arange(1000)])
            time.sleep(0.01)
    ends[0].close()


def test_a_message_that_cannot_be_copied_leaves_its_slot_free():
    class Broken:
        dtype, shape = np.dtype("float32"), (3,)

        @property
        def is_fully_replicated(self):
            raise RuntimeError("the task that makes it failed")

    ends = connected("shared_memory")
    for tag in range(3):
        with pytest.raises(RuntimeError, match="the task that makes it failed"):
            ends[0].send(MessageId(0, 0, 1, tag), [Broken()])
    sender = ends[0]._senders[1]
    assert all(slot.free for slots in sender._slots.values() for slot in slots)
    for router in ends:
        router.close()


@contextlib.contextmanager
def free_descriptors(count):
    """A context in which this process can open so many more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = [os.dup(0) for _ in range(count + 1)]
    for descriptor in lowest:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest[-1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(("num_free", "num_arrays"), [(0, 1), (1, 1), (0, 3000)])
def test_without_a_free_descriptor_for_a_moment_no_message_is_lost_for_ever(
    monkeypatch, num_free, num_arrays
):
    """The announcement of a slot, its memory, or an announcement that comes in memory cannot be opened."""
    monkeypatch.setattr(inbox_module, "ABORT_REASON_SECONDS", 0.1)
    ends = connected("shared_memory")
    arrays = [np.arange(5.0)] * num_arrays
    wanted = [jax.sharding.SingleDeviceSharding(jax.devices()[1])] * num_arrays
    ends[0].send(MessageId(0, 0, 1, 0), arrays)
    before = os.listdir("/proc/self/fd")
    reason = "group 0 is gone: group 1 cannot take a message of group 0: OSError: .*oo many open files"
    with free_descriptors(num_free), pytest.raises(StepAborted, match=reason):
        ends[1].recv(MessageId(0, 0, 1, 0), wanted)
    assert os.listdir("/proc/self/fd") == before, "none is left open"
    assert ends[1].lost.process == 1, "a new process in its place has descriptors"
    for router in ends:
        router.begin_step(1)
    with pytest.raises(StepAborted, match=reason):
        ends[1].recv(MessageId(1, 0, 1, 0), wanted)
    with pytest.raises(StepAborted, match="group 1 is gone"):
        ends[0].send(MessageId(1, 0, 1, 0), [np.arange(70_000)])
    for router in ends:
        router.close()
    connect(ends, "shared_memory")
    ends[0].send(MessageId(1, 0, 1, 0), arrays)
    for value in ends[1].recv(MessageId(1, 0, 1, 0), wanted):
        np.testing.assert_array_equal(value, np.arange(5.0))
    for router in ends:
        router.close()


@pytest.mark.usual("network")
@pytest.mark.parametrize("name", ["network", "device"])
def test_messages_of_an_aborted_step_in_both_directions_block_no_sender(name):
    """More of them than sockets can hold."""
    ends = connected(name)
    for router in ends:
        router.abort(0, "a task failed")
    packet = np.zeros(16 * 1024, "uint8")

    def send(mpmd_idx):
        for tag in range(1500):
            ends[mpmd_idx].send(MessageId(0, mpmd_idx, 1 - mpmd_idx, tag), [packet])

    threads = [threading.Thread(target=send, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    for router in ends:
        router.close()


@pytest.mark.parametrize("name", WITHOUT_RAY)
def test_a_message_may_have_any_number_of_arrays(name):
    """In shared memory the description of so many is larger than a packet of a Unix socket."""
    ends = connected(name)
    count = 20_000 if name == "shared_memory" else 2_000
    arrays = [np.full(i % 3, i, "float32") for i in range(count)]
    shardings = [jax.sharding.SingleDeviceSharding(jax.devices()[1])] * len(arrays)
    for step in range(2):  # for the second, shared memory has the layout
        message = MessageId(step, 0, 1, 0)
        ends[0].send(message, arrays)
        received = ends[1].recv(message, shardings)
        assert all(
            value.dtype == array.dtype and value.shape == array.shape and (np.asarray(value) == array).all()
            for value, array in zip(received, arrays, strict=True)
        )
    for router in ends:
        router.close()


@pytest.mark.parametrize("name", WITHOUT_RAY)
def test_messages_of_earlier_steps_are_dropped_and_count_as_received(name):
    """If they did not count, the sender would wait for them before its next step but one."""
    ends = connected(name)
    shardings = [jax.sharding.SingleDeviceSharding(jax.devices()[1])]
    for step in range(1, 10, 2):
        ends[1].begin_step(step)
        ends[0].send(MessageId(step - 1, 0, 1, 0), [np.ones(9)])
        ends[0].send(MessageId(step, 0, 1, 0), [np.full(9, step)])
        np.testing.assert_array_equal(ends[1].recv(MessageId(step, 0, 1, 0), shardings)[0], np.full(9, step))
    if name == "shared_memory":
        sender = ends[0]._senders[1]
        occupied = [slot for slots in sender._slots.values() for slot in slots if not slot.free]
        assert len(occupied) <= 1, "the slot of the last message may still be lent"
    for router in ends:
        router.close()


@pytest.mark.parametrize("name", WITHOUT_RAY)
def test_connections_can_be_made_anew_behind_the_same_objects(name):
    """Messages of before are gone, and so are the limits that they have put on senders."""
    ends = connected(name)
    wanted = [jax.sharding.SingleDeviceSharding(jax.devices()[1])]
    for step in (3, 8, 9):
        for router in ends:
            router.begin_step(step)
        for tag in range(3):
            ends[0].send(MessageId(step, 0, 1, tag), [np.full(9000, step)])
        received = ends[1].recv(MessageId(step, 0, 1, 2), wanted)[0]  # the others are not read
        np.testing.assert_array_equal(received, np.full(9000, step))
        ends[0].abort(step + 1, "group 1 died")
        for router in ends:
            router.close()
        connect(ends, name)
    np.testing.assert_array_equal(received, np.full(9000, 9))  # its memory outlives the connection
    for router in ends:
        router.close()


@pytest.mark.parametrize("name", WITHOUT_RAY)
def test_waiting_for_a_peer_that_does_not_come_can_be_ended(name):
    ends = connected(name)
    for router in ends:
        router.close()
    credentials = make_credentials()
    addresses = [router.listen([name], "127.0.0.1", credentials) for router in ends]
    failures = queue.SimpleQueue()

    def connect_alone(index):
        try:
            ends[index].connect({1 - index: name}, addresses)
        except Exception as error:  # of any type, which the test does not mind
            failures.put(error)

    # The last one only waits in any case, as its peer does not come.
    waiting = threading.Thread(target=connect_alone, args=(1,))
    waiting.start()
    time.sleep(0.1)
    assert failures.empty()
    ends[1].interrupt()
    waiting.join(20)
    assert isinstance(failures.get(timeout=1), OSError)
    for router in ends:
        router.close()
    connect(ends, name)
    message = MessageId(0, 0, 1, 0)
    ends[0].send(message, [np.arange(5)])
    wanted = [jax.sharding.SingleDeviceSharding(jax.devices()[1])]
    np.testing.assert_array_equal(ends[1].recv(message, wanted)[0], np.arange(5))
    for router in ends:
        router.close()


def test_a_peer_that_is_stopped_while_it_connects_in_shared_memory_need_not_be_waited_for():
    """It has connected, and does not say which process it is."""
    ends = connected("shared_memory")
    for router in ends:
        router.close()
    credentials = make_credentials()
    addresses = [router.listen(["shared_memory"], "127.0.0.1", credentials) for router in ends]
    stopped = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stopped.connect("\0" + addresses[1]["shared_memory"].name)
    with ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(ends[1].connect, {0: "shared_memory"}, addresses)
        while not any(each.name == "handshake" for each in threading.enumerate()):
            time.sleep(0.01)
        ends[1].interrupt()
        with pytest.raises(ConnectionError):
            connecting.result(20)
    stopped.close()
    for router in ends:
        router.close()
