"""Transports that are connected with one another within this process."""

import contextlib
import gc
import os
import queue
import resource
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cluster.transports import inbox as inbox_module
from mpmd.errors import StepAborted
from mpmd.runtime.transport import MessageId
from tests.support.pairs import SECONDS, Broken, Pair
from tests.support.waiting import await_that

LARGE = np.arange(70_000)


@pytest.fixture(params=["shared_memory", "network", "device"])
def pair(request):
    """Connected by a transport that needs no Ray."""
    with Pair(request.param) as pair:
        yield pair.connect()


@pytest.fixture
def neighbours():
    with Pair("shared_memory") as pair:
        yield pair.connect()


def test_a_group_that_closes_is_gone_for_its_peers(monkeypatch, pair):
    monkeypatch.setattr(inbox_module, "ABORT_REASON_SECONDS", 0.1)
    pair.send(0, LARGE)
    np.testing.assert_array_equal(pair.take(0), [LARGE])
    pair.ends[0].close()
    with pytest.raises(StepAborted, match="group 0 is gone"):
        pair.take(1)
    with pytest.raises(StepAborted, match="group 0 is gone"):
        pair.ends[1].send(MessageId(0, 1, 0, 0), [LARGE])


def test_a_message_has_arrived_before_the_receiver_looks(pair):
    for tag in range(2):
        before = time.perf_counter_ns()
        pair.send(tag, np.arange(1000))
        time.sleep(0.3)
        looked = time.perf_counter_ns()
        pair.take(tag)
        assert before <= pair.ends[1].arrived < looked


def test_a_group_that_dies_before_it_has_received_is_gone_too(monkeypatch, pair):
    monkeypatch.setattr(inbox_module, "ABORT_REASON_SECONDS", 0.1)
    for tag in range(3):
        pair.send(tag, np.arange(1000 * (tag + 1)))
    pair.ends[1].close()
    with pytest.raises(StepAborted, match="group 1 is gone"):
        for tag in range(3, 1000):  # what is sent before the end is noticed, is lost
            pair.send(tag, np.arange(1000))
            time.sleep(0.01)


def test_memory_of_peers_is_let_go_when_connections_end(pair):
    """Not only by the next garbage collection, which may be hours later."""
    pair.send(0, LARGE)
    pair.send(1, LARGE)  # is not taken
    pair.take(0)
    inboxes = [weakref.ref(router._inbox) for router in pair.ends]
    gc.disable()
    try:
        pair.reset()
        assert [inbox() for inbox in inboxes] == [None, None]
    finally:
        gc.enable()


def test_a_message_that_cannot_be_copied_leaves_its_slot_free(neighbours):
    for tag in range(3):
        with pytest.raises(RuntimeError, match="the task that makes it failed"):
            neighbours.send(tag, Broken())
    sender = neighbours.ends[0]._senders[1]
    assert all(slot.free for slots in sender._slots.values() for slot in slots)


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


@pytest.mark.parametrize("num_free", [0, 1])
def test_without_a_free_descriptor_for_a_moment_no_message_is_lost_for_ever(
    monkeypatch, neighbours, num_free
):
    """The descriptor of a slot cannot be received, or its memory not mapped."""
    monkeypatch.setattr(inbox_module, "ABORT_REASON_SECONDS", 0.1)
    neighbours.send(0, LARGE)
    before = os.listdir("/proc/self/fd")
    reason = "group 0 is gone: group 1 cannot take a message of group 0: OSError: .*oo many open files"
    with free_descriptors(num_free), pytest.raises(StepAborted, match=reason):
        neighbours.take(0)
    assert os.listdir("/proc/self/fd") == before, "none is left open"
    assert neighbours.ends[1].lost.process == 1, "a new process in its place has descriptors"
    for router in neighbours.ends:
        router.begin_step(1)
    with pytest.raises(StepAborted, match=reason):
        neighbours.take(0, step=1)
    with pytest.raises(StepAborted, match="group 1 is gone"):
        neighbours.send(0, LARGE, step=1)
    neighbours.reset()
    neighbours.connect()
    neighbours.send(0, LARGE, step=1)
    np.testing.assert_array_equal(neighbours.take(0, step=1), [LARGE])


@pytest.mark.usual("network")
@pytest.mark.parametrize("name", ["network", "device"])
def test_messages_of_an_aborted_step_in_both_directions_block_no_sender(name):
    """More of them than sockets can hold."""
    packet = np.zeros(16 * 1024, "uint8")
    with Pair(name) as pair, ThreadPoolExecutor(2) as threads:
        for router in pair.connect().ends:
            router.abort(0, "a task failed")

        def send(mpmd_idx):
            for tag in range(1500):
                pair.ends[mpmd_idx].send(MessageId(0, mpmd_idx, 1 - mpmd_idx, tag), [packet])

        list(threads.map(send, range(2), timeout=30))


def test_a_message_may_have_any_number_of_arrays(pair):
    count = 2_000
    arrays = [np.full(i % 3, i, "float32") for i in range(count)]
    for step in range(2):
        pair.send(0, *arrays, step=step)
        for value, array in zip(pair.take(0, step, count), arrays, strict=True):
            assert value.dtype == array.dtype and value.tolist() == array.tolist()


def test_messages_of_earlier_steps_are_dropped_and_the_sender_hears_of_the_step(pair):
    """A sender that did not hear of the step would wait two steps later."""
    for step in range(1, 10, 2):
        pair.ends[1].begin_step(step)
        pair.send(0, np.ones(9), step=step - 1)
        pair.send(0, np.full(9, step), step=step)
        np.testing.assert_array_equal(pair.take(0, step), [np.full(9, step)])
    if pair.name == "shared_memory":
        sender = pair.ends[0]._senders[1]
        occupied = [slot for slots in sender._slots.values() for slot in slots if not slot.free]
        assert len(occupied) <= 1, "the slot of the last message may still be lent"


def test_connections_can_be_made_anew_behind_the_same_objects(pair):
    """Messages of before are gone, and so are the limits that they have put on senders."""
    for step in (3, 8, 9):
        for router in pair.ends:
            router.begin_step(step)
        for tag in range(3):
            pair.send(tag, np.full(9000, step), step=step)
        received = pair.take(2, step)  # the others are not read
        np.testing.assert_array_equal(received, [np.full(9000, step)])
        pair.ends[0].abort(step + 1, "group 1 died")
        pair.reset()
        pair.connect()
    np.testing.assert_array_equal(received, [np.full(9000, 9)])  # its memory outlives the connection


def test_waiting_for_a_peer_that_does_not_come_can_be_ended(pair):
    pair.reset()
    failures = queue.SimpleQueue()

    def connect_alone():
        try:
            pair.ends[1].connect({0: pair.name}, pair.addresses)
        except Exception as error:  # of any type, which the test does not mind
            failures.put(error)

    # The last one only waits in any case, as its peer does not come.
    waiting = threading.Thread(target=connect_alone)
    waiting.start()
    time.sleep(0.1)
    assert failures.empty()
    pair.ends[1].interrupt()
    waiting.join(SECONDS)
    assert isinstance(failures.get(timeout=1), OSError)
    pair.reset()
    pair.connect().send(0, np.arange(5))
    np.testing.assert_array_equal(pair.take(0), [np.arange(5)])


def test_a_peer_that_is_stopped_while_it_connects_in_shared_memory_need_not_be_waited_for():
    """It has connected, and does not say which process it is."""
    with (
        Pair("shared_memory") as pair,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stopped,
        ThreadPoolExecutor(1) as thread,
    ):
        stopped.connect("\0" + pair.addresses[1]["shared_memory"].name)
        connecting = thread.submit(pair.ends[1].connect, {0: "shared_memory"}, pair.addresses)
        await_that(lambda: any(each.name == "handshake" for each in threading.enumerate()))
        pair.ends[1].interrupt()
        with pytest.raises(ConnectionError):
            connecting.result(SECONDS)
