"""The connection between the driver and a group, with both ends in this process."""

import gc
import queue
import threading
import weakref

import numpy as np
import pytest

from cluster.tcp import frames
from cluster.tcp.credentials import make_credentials
from cluster.tcp.frames import encode
from cluster.tcp.rpc import Client, Server
from tests.support.pairs import both_ends
from tests.support.waiting import await_that

SECONDS = 20
CREDENTIALS = make_credentials()


class FailsToUnpickle(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class GroupThread:
    """A server whose requests a thread of this process answers."""

    def __init__(self):
        accepted, self.connected = both_ends(CREDENTIALS)
        self.server = Server("group 3", accepted)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.seen = []
        self.raised = None

    def serve(self):
        try:
            self.server.serve(self.answer)
        except Exception as error:
            self.raised = error

    def answer(self, request):
        self.may_answer.wait()
        method, arguments = request
        return getattr(self, method)(*arguments)

    def echo(self, *values):
        return values

    def remember(self, array, error=None):
        self.seen.append(weakref.ref(array))
        if error:
            raise error

    def fail_to_unpickle(self):
        raise FailsToUnpickle(1, 2)

    def fail_with_a_local_error(self):
        class Local(Exception):
            pass

        raise Local("defined in a function")

    def unpicklable(self):
        return threading.Lock()


class WaitingClient:
    """A client whose ``ask`` waits for the reply."""

    def __init__(self, connection):
        self.replies, self.ends = queue.SimpleQueue(), queue.SimpleQueue()
        self.connection = connection
        self.client = Client(self.connection, self.replies.put, self.ends.put)

    def send(self, number, method, *arguments):
        self.client.send(encode(number, (method, arguments)))

    def reply(self):
        reply = self.replies.get(timeout=SECONDS)
        return reply.number, reply.decode()

    def ask(self, method, *arguments):
        self.send(7, method, *arguments)
        number, reply = self.reply()
        assert number == 7
        return reply


@pytest.fixture
def group():
    return GroupThread()


@pytest.fixture
def driver(group):
    driver = WaitingClient(group.connected)
    yield driver
    group.may_answer.set()
    driver.client.close()
    group.thread.join(SECONDS)
    assert not group.thread.is_alive()


@pytest.mark.parametrize("make", [np.asfortranarray, lambda a: a[::2], lambda a: a.T[1:], lambda a: a[:0]])
def test_arrays_of_any_layout_travel(driver, make):
    array = make(np.arange(400_000.0).reshape(400, 1000))
    (back,) = driver.ask("echo", array)
    np.testing.assert_array_equal(back, array)


def test_large_arrays_are_not_copied_into_the_message():
    array = np.ones(100_000)
    message = encode(0, ("x", array))
    assert len(message.content) < 1000
    assert np.shares_memory(np.frombuffer(message.buffers[0]), array)


def test_requests_are_answered_in_order_and_no_caller_waits_for_the_network(group, driver):
    group.may_answer.clear()
    arrays = [np.full(2**20, i, np.int32) for i in range(8)]  # more than any socket holds
    for i, array in enumerate(arrays):
        driver.send(i, "echo", array)
    group.may_answer.set()
    for i, array in enumerate(arrays):
        number, (back,) = driver.reply()
        assert number == i
        np.testing.assert_array_equal(back, array)


def test_errors_and_results_that_do_not_pickle_are_replied_as_text(driver):
    reply = driver.ask("fail_with_a_local_error")
    assert "defined in a function" in str(reply.cause)
    assert "pickle" in str(driver.ask("unpicklable").cause)
    assert driver.ask("echo", 1) == (1,)


def test_a_reply_that_does_not_unpickle_leaves_the_others_intact(driver):
    driver.send(1, "fail_to_unpickle")
    driver.send(2, "echo", "fine")
    first = driver.replies.get(timeout=SECONDS)
    with pytest.raises(TypeError, match="second"):
        first.decode()
    assert driver.reply() == (2, ("fine",))


def test_a_request_that_does_not_pickle_is_refused_before_anything_is_sent():
    with pytest.raises(TypeError, match="pickle"):
        encode(0, ("echo", (threading.Lock(),)))


@pytest.mark.parametrize("error", [None, ValueError("late")], ids=["answered", "failed"])
def test_an_idle_group_keeps_nothing_of_the_last_request(group, driver, error):
    driver.ask("remember", np.ones(100_000), error)

    def is_gone():
        gc.collect()
        return group.seen[0]() is None

    await_that(is_gone)


def test_a_request_that_breaks_off_ends_the_connection(group, driver, monkeypatch):
    """The group would take the next request for the rest of it."""

    write_some = driver.connection.write_some

    def breaks_off(record, wait):
        write_some([record[0][:5]], wait)
        raise MemoryError("no room for the rest")

    monkeypatch.setattr(driver.connection, "write_some", breaks_off)
    driver.send(1, "echo", 1)
    assert "no room for the rest" in str(driver.ends.get(timeout=SECONDS))
    group.thread.join(SECONDS)
    assert not group.thread.is_alive()


def test_a_request_too_large_for_the_group_ends_the_connection(group, driver, monkeypatch):
    def too_large(connection, num_bytes):
        raise MemoryError("too large")

    array = np.ones(100_000)
    assert driver.ask("echo", 1) == (1,)
    monkeypatch.setattr(frames, "_read_bytes", too_large)
    driver.send(1, "echo", array)
    driver.ends.get(timeout=SECONDS)
    group.thread.join(SECONDS)
    assert "too large" in str(group.raised)
