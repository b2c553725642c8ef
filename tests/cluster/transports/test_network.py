"""The transport over the network, between two ends in this process."""

import errno
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cluster.transports import inbox as inbox_module
from cluster.transports.inbox import PeerLostError
from mpmd.errors import StepAborted
from tests.support.pairs import SECONDS, Broken, Pair
from tests.support.waiting import await_that

HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0])


class NetworkPair(Pair):
    def peer(self, end):
        """The connection as one end sees it."""
        return self.ends[end]._transports["network"]._peers[1 - end]


@pytest.fixture(params=[False, True], ids=["in clear", "encrypted"])
def pair(request):
    with NetworkPair("network", request.param) as pair:
        yield pair.connect()


@pytest.fixture
def stalled(pair):
    """Lets nothing be read at the receiving end, until it is set; more is sent than sockets hold."""
    may_read = threading.Event()
    connection = pair.peer(1)._connection
    read_into = connection.read_into

    def read_later(buffer):
        assert may_read.wait(SECONDS)
        read_into(buffer)

    connection.read_into = read_later
    yield may_read
    may_read.set()


LARGE = 2**22
"""Elements of float32: 16 MiB, more than sockets hold."""

VALUES = [
    np.array(3, "int32"),
    np.array(True),
    np.zeros((0, 4), ml_dtypes.bfloat16),
    np.arange(100_002).reshape(3, -1).astype(ml_dtypes.bfloat16),
    np.arange(7) % 2 == 0,
    np.arange(8).astype(ml_dtypes.int4),
    np.asfortranarray(np.arange(90_000.0).reshape(300, 300)),
    np.arange(90_000)[::-3],
    np.random.default_rng(0).standard_normal((512, 514), "float32"),
]


def assert_same(values, arrays):
    for value, array in zip(values, arrays, strict=True):
        assert (value.dtype, value.shape) == (array.dtype, array.shape)
        assert value.tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize("on_device", [False, True], ids=["from the host", "from a device"])
def test_every_bit_arrives_for_any_dtype_shape_and_layout(pair, on_device):
    arrays = [jnp.asarray(value) for value in VALUES] if on_device else VALUES
    for step in range(2):
        pair.send(0, *arrays, step=step)
        pair.send(1, step=step)
        assert_same(pair.take(0, step, len(arrays)), arrays)
        assert pair.take(1, step, 0) == []


def test_values_that_several_devices_hold_arrive_whole(pair):
    submesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    array = np.arange(40_000.0, dtype="float32").reshape(200, 200)
    for tag, spec in enumerate([(), ("a",), (None, "b"), ("b", "a")]):
        sharding = jax.sharding.NamedSharding(submesh, jax.sharding.PartitionSpec(*spec))
        pair.send(tag, jax.device_put(array, sharding))
        assert_same(pair.take(tag), [array])


def test_executables_read_what_was_received_in_place(pair):
    pair.send(0, *VALUES)
    for value in pair.take(0, count=len(VALUES)):
        assert not value.flags.writeable
        assert value.ctypes.data % 64 == 0
        if value.nbytes and value.dtype not in (ml_dtypes.int4, "int64", "float64"):  # JAX converts these
            array = jax.device_put(value, HOST)
            assert array.unsafe_buffer_pointer() == value.ctypes.data, "nothing is copied"


def test_memory_is_used_again_only_when_nothing_refers_to_a_message(pair):
    """Neither numpy's views, nor arrays of JAX that alias the memory."""
    buffers = pair.peer(1)._buffers
    pair.send(0, np.full(50_000, 1.0, "float32"), np.ones(3))
    value, other = pair.take(0, count=2)
    array = jax.device_put(value, HOST)
    row = value[3:9]
    del value, other
    for tag in range(1, 4):
        pair.send(tag, np.full(50_000, 2.0, "float32"), np.ones(3))
        pair.take(tag, count=2)
    assert (np.asarray(array) == 1).all()
    assert (row == 1).all()
    in_use = weakref.ref(array)
    del array, row
    gc.collect()
    assert in_use() is None
    jax.device_put(0.0)  # JAX lets go of host memory when it is next called
    (free,) = buffers._free.values()
    await_that(lambda: free)
    assert len(free) < 4, "memory is used again"
    pair.ends[1].trim()
    assert not buffers._free


def test_large_values_are_sent_from_where_they_are(pair, monkeypatch):
    written = []
    monkeypatch.setattr(pair.peer(0)._writer, "put", written.extend)
    array = jnp.arange(100_000)
    pair.send(0, array)
    assert any(np.shares_memory(np.frombuffer(piece, "uint8"), np.asarray(array)) for piece in written)


def test_a_message_that_cannot_be_made_leaves_the_connection_as_it_was(pair):
    for tag in range(3):
        with pytest.raises(RuntimeError, match="the task that makes it failed"):
            pair.send(tag, np.ones(3), Broken())
    pair.send(3, np.ones(3), np.zeros(3, "float32"))
    assert_same(pair.take(3, count=2), [np.ones(3), np.zeros(3, "float32")])


@pytest.mark.parametrize("how", ["donated", "deleted"])
def test_what_is_still_to_be_sent_may_be_donated_or_deleted(pair, stalled, how):
    array = jax.device_put(np.full(LARGE, 7.0, "float32"), HOST)
    pair.send(0, array)
    if how == "donated":
        jax.block_until_ready(jax.jit(jnp.negative, donate_argnums=0)(array))
    array.delete()
    others = [jnp.full(LARGE, float(i)) for i in range(3)]  # they would take memory that is free
    stalled.set()
    assert (pair.take(0)[0] == 7).all()
    del others


def test_messages_are_sent_in_order_whoever_writes_them(pair):
    """Small ones are written by the caller, large ones by a thread."""
    sizes = [3, LARGE // 4, 5, 7, LARGE // 4, 1]
    arrived = []
    add = pair.ends[1]._inbox.add
    pair.ends[1]._inbox.add = lambda message, arrival: (arrived.append(message.tag), add(message, arrival))
    for tag, size in enumerate(sizes):
        pair.send(tag, np.full(size, tag, "float32"))
    assert [pair.take(tag)[0].size for tag in reversed(range(len(sizes)))] == sizes[::-1]
    assert arrived == list(range(len(sizes)))


def test_a_sender_waits_for_its_window_until_the_step_is_aborted(pair):
    for step in (1, 2):
        pair.send(0, np.ones(9), step=step)
        pair.ends[1].begin_step(1)
    threading.Timer(0.1, pair.ends[0].abort, (3, "fwd_0 failed")).start()
    with pytest.raises(StepAborted, match="fwd_0 failed"):
        pair.send(0, np.ones(9), step=3)
    pair.ends[1].begin_step(2)
    pair.send(0, np.ones(9), step=4)  # in the aborted step, nothing was sent


def test_an_idle_connection_keeps_no_array(pair):
    array = np.ones(LARGE, "float32")
    sent = weakref.ref(array)
    pair.send(0, array)
    pair.take(0)
    del array
    await_that(lambda: sent() is None)


@pytest.mark.parametrize(
    ("error", "culprit", "reason"),
    [
        (OSError(errno.ETIMEDOUT, "Connection timed out"), 0, "network has not reached it for 60 s"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), 0, "its process has closed its connections"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "group 1 cannot take a message of group 0"),
        (MemoryError("too large"), 1, "group 1 cannot take a message of group 0"),
    ],
)
def test_the_reason_for_a_lost_connection_is_told(pair, monkeypatch, error, culprit, reason):
    monkeypatch.setattr(inbox_module, "ABORT_REASON_SECONDS", 0.1)

    def fail(num_bytes):
        raise error

    pair.peer(1)._buffers.take = fail
    pair.send(0, np.ones(9))
    with pytest.raises(StepAborted, match=reason):
        pair.take(0)
    lost = pickle.loads(pickle.dumps(pair.ends[1].lost))
    assert isinstance(lost, PeerLostError)
    assert (lost.process, reason in str(lost)) == (culprit, True)
