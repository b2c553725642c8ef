"""The line between the driver and a group, with both ends in this process."""

import gc
import multiprocessing
import pickle
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest
import ray

from cluster import line as lines
from cluster.line import Desk, dial, frame
from cluster.wire import pack, unpack

SECONDS = 20
SECRET = b"known to both"


class Group:
    """A desk that is served by a thread."""

    def __init__(self):
        self.desk = Desk("127.0.0.1", SECRET)
        self.thread = threading.Thread(target=self.desk.serve, args=(self.answer,), daemon=True)
        self.thread.start()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def answer(self, method, arguments):
        self.may_answer.wait()
        return getattr(self, method)(*arguments)

    def echo(self, *values):
        return values

    def fail(self, error):
        raise error

    def unpicklable(self):
        return threading.Lock()


@pytest.fixture
def group():
    return Group()


@pytest.fixture
def line(group):
    line = dial(group.desk.address, SECRET)
    yield line
    line.end()
    line.close()
    group.may_answer.set()
    group.thread.join(SECONDS)
    assert not group.thread.is_alive()


def ask(line, method, *arguments):
    line.write(frame((7, method, arguments)))
    number, reply = line.read()
    assert number == 7
    return reply


@pytest.mark.parametrize("elements", [0, 1, 1000, 300_000])
@pytest.mark.parametrize("dtype", ["float32", "bool", ml_dtypes.bfloat16])
def test_arrays_come_back_as_they_were(line, dtype, elements):
    array = (np.arange(elements) % 3).astype(dtype).reshape(-1, 1)
    array.flags.writeable = False
    (packed,) = ask(line, "echo", pack(array))
    back = unpack(packed)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("make", [np.asfortranarray, lambda a: a[::2], lambda a: a.T[1:]])
def test_arrays_of_any_layout_travel(line, make):
    array = make(np.arange(400_000.0).reshape(400, 1000))
    (back,) = ask(line, "echo", array)
    np.testing.assert_array_equal(back, array)


def test_large_arrays_are_not_copied_into_the_message_and_belong_to_the_reader(line):
    array = np.ones(100_000)
    message = frame(("x", array))
    assert len(message.content) < 1000
    assert np.shares_memory(np.frombuffer(message.buffers[0]), array)
    (back,) = ask(line, "echo", array)
    back[:] = 2  # nobody else's


def test_requests_are_answered_in_order_and_sending_does_not_wait_for_the_group(group, line):
    group.may_answer.clear()
    arrays = [np.full(2**20, i, np.int32) for i in range(8)]  # more than any socket holds
    for i, array in enumerate(arrays):
        line.write(frame((i, "echo", (array,))))
    group.may_answer.set()
    for i, array in enumerate(arrays):
        number, (back,) = line.read()
        assert number == i
        np.testing.assert_array_equal(back, array)


def test_what_a_method_raises_is_a_reply_with_its_traceback(line):
    reply = ask(line, "fail", KeyError("missing"))
    assert isinstance(reply, ray.exceptions.RayTaskError)
    assert repr(reply.cause) == "KeyError('missing')"
    assert "in fail" in str(reply)
    assert ask(line, "echo", 1) == (1,)


def test_a_reply_that_does_not_pickle_says_so(line):
    reply = ask(line, "unpicklable")
    assert isinstance(reply.cause, TypeError)
    assert "pickle" in str(reply.cause)
    assert ask(line, "echo", 1) == (1,)


def test_a_request_that_does_not_pickle_is_refused_before_anything_is_sent(line):
    with pytest.raises((TypeError, pickle.PicklingError), match="pickle"):
        frame((0, "echo", (threading.Lock(),)))
    assert ask(line, "echo", 1) == (1,)


def test_an_idle_group_keeps_nothing_of_the_last_request(group, line):
    seen = []
    group.echo = lambda array: seen.append(weakref.ref(array))
    ask(line, "echo", np.ones(100_000))
    end = time.monotonic() + SECONDS
    while seen[0]() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert seen[0]() is None


def test_strangers_are_refused_and_the_driver_is_still_taken(group):
    with pytest.raises(multiprocessing.AuthenticationError):
        dial(group.desk.address, b"a guess")
    line = dial(group.desk.address, SECRET)
    assert ask(line, "echo", 1) == (1,)
    line.close()
    group.thread.join(SECONDS)
    assert not group.thread.is_alive()


def test_whoever_reads_is_told_of_the_end(line):
    threading.Timer(0.2, line.end).start()
    with pytest.raises((EOFError, OSError)):
        line.read()
    with pytest.raises(OSError):
        line.write(frame(1))
    line.end()


def test_a_reply_that_stops_midway_ends_the_line(monkeypatch):
    monkeypatch.setattr(lines, "_STOPPED_SECONDS", 1)
    listener = multiprocessing.connection.Listener(("127.0.0.1", 0), authkey=SECRET)
    taken = []
    accepting = threading.Thread(target=lambda: taken.append(listener.accept()))
    accepting.start()
    line = dial(listener.address, SECRET)
    accepting.join(SECONDS)
    half = lines.socket_of(taken[0])
    half.sendall(frame((0, np.ones(9))).content[:5])
    with pytest.raises(OSError):
        line.read()
    for end in (half, taken[0], listener, line):
        end.close()
