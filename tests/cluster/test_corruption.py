"""A bit that flips on the way: every one ends in an error that names both ends, and none is waited for."""

import contextlib
import os
import queue
import random
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cluster.protocol.digests import CorruptedError
from cluster.tcp import sockets
from cluster.tcp.credentials import make_credentials
from cluster.tcp.frames import encode
from cluster.tcp.rpc import Client, Server
from cluster.transports import inbox as inbox_module
from cluster.transports.inbox import HEADER_BYTES, PeerLostError
from mpmd.errors import StepAborted
from mpmd.runtime.transport import MessageId
from tests.support.pairs import SECONDS, Pair, both_ends
from tests.support.proxy import Flips, Proxy

BOTH_ENDS = r"127\.0\.0\.1:\d+ to 127\.0\.0\.1:\d+ was changed on the way"
GONE = "group 0 is gone: what it sends to group 1 does not arrive as it was sent: .* was changed on the way"

SMALL = np.arange(1000, dtype="float32")
LARGE = np.arange(200_000, dtype="float32")


class ThroughProxy(Pair):
    """Connected, with a proxy between both ends where they use TCP."""

    def __init__(self, name, encryption=False):
        super().__init__(name, encryption)
        self.flips, self.proxy = Flips(), contextlib.nullcontext()
        if name != "shared_memory":
            self.proxy = Proxy(self.addresses[1]["tcp"], self.flips)
            self.addresses[1]["tcp"] = self.proxy.address
        self.connect()

    def __exit__(self, *exception):
        super().__exit__()
        self.proxy.__exit__(*exception)


def assert_lost(pair, tag):
    """The receiving end does not wait, gets no value, and says who is lost to whom, and why."""
    with pytest.raises(StepAborted, match=GONE):
        pair.take(tag)
    assert isinstance(pair.ends[1].lost, PeerLostError)
    assert (pair.ends[1].lost.process, "group 1" in str(pair.ends[1].lost)) == (0, True)


def message_bytes(name, encryption, array):
    """How many bytes a message takes on the way, once its layout is known."""
    with ThroughProxy(name, encryption) as pair:
        pair.send(0, array)
        pair.take(0)
        before = pair.flips.passed
        pair.send(1, array)
        pair.take(1)
        return pair.flips.passed - before


def offsets(num_bytes, num_first, count):
    """Every third of the first bytes, some later bytes, and the last byte."""
    rest = random.Random(num_bytes).sample(range(num_first, num_bytes - 1), count)
    return [*range(0, num_first, 3), *rest, num_bytes - 1]


@pytest.mark.parametrize("array", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("encryption", "num_first"), [(False, 50), (True, 10)], ids=["clear", "encrypted"])
def test_a_bit_that_flips_on_the_network_ends_the_connection(array, encryption, num_first):
    """In the length of a record, its digests, the header of a message, with its tag and step, or a value."""
    num_bytes = message_bytes("network", encryption, array)
    assert num_bytes > array.nbytes + 41
    for offset in offsets(num_bytes, num_first, 8):
        with ThroughProxy("network", encryption) as pair:
            pair.send(0, array)
            np.testing.assert_array_equal(pair.take(0), [array])
            pair.flips.arm(offset, offset % 8)
            pair.send(1, array)
            assert_lost(pair, 1)


def test_a_bit_that_flips_in_the_types_of_a_message_ends_the_connection():
    with ThroughProxy("network") as pair:
        pair.flips.arm(45)
        pair.send(0, SMALL)
        assert_lost(pair, 0)


def test_the_end_that_has_sent_what_was_changed_notices_it_too(monkeypatch):
    monkeypatch.setattr(inbox_module, "ABORT_REASON_SECONDS", 0.1)
    with ThroughProxy("network") as pair:
        pair.flips.arm(30)
        pair.send(0, SMALL)
        with pytest.raises(StepAborted, match="group 1 is gone"):
            pair.ends[0].recv(MessageId(0, 1, 0, 0), [pair.wanted])


@pytest.mark.parametrize("offset", [3, 30, 500])
def test_a_bit_that_flips_in_what_the_device_transport_announces_ends_the_connection(offset):
    with ThroughProxy("device") as pair:
        pair.send(0, SMALL)
        np.testing.assert_array_equal(pair.take(0), [SMALL])
        pair.flips.arm(offset)
        pair.send(1, SMALL)
        assert_lost(pair, 1)


@pytest.mark.parametrize("array", [SMALL, LARGE], ids=["small", "large"])
def test_a_bit_that_flips_in_shared_memory_ends_the_connection(array):
    for byte in (0, 1, array.nbytes // 2, array.nbytes - 1):
        with ThroughProxy("shared_memory") as pair:
            pair.send(0, array)
            pair.ends[1].begin_step(0)
            sender = pair.ends[0]._senders[1]
            (slots,) = sender._slots.values()
            slots[0]._memory[slots[0]._start + 64 + byte] ^= 4
            assert_lost(pair, 0)


def test_a_bit_that_flips_in_the_header_of_a_message_in_shared_memory_ends_the_connection():
    """In its source, its tag, its step, the number of its slot, its sizes, or a digest."""
    for byte in range(HEADER_BYTES):
        with ThroughProxy("shared_memory") as pair:
            pair.send(0, SMALL)
            np.testing.assert_array_equal(pair.take(0), [SMALL])
            sender = pair.ends[0]._senders[1]
            sender._write_fd = flipping_pipe(sender._write_fd, byte)
            pair.send(1, SMALL)
            assert_lost(pair, 1)


def flipping_pipe(write_fd, byte):
    """A descriptor of a pipe from which what is written comes to another one, with a bit flipped."""
    reading, writing = os.pipe()

    def pump():
        header = bytearray(os.read(reading, HEADER_BYTES))
        header[byte] ^= 2
        os.write(write_fd, header)
        os.close(reading)
        os.close(write_fd)

    threading.Thread(target=pump).start()
    return writing


@pytest.mark.parametrize("byte", [0, 7, 8, 15])
def test_a_bit_that_flips_in_an_announcement_of_shared_memory_ends_the_connection(monkeypatch, byte):
    """In its digest, or in the size of the slots."""
    send_fds = socket.send_fds

    def send_flipped(connection, buffers, descriptors):
        packet = bytearray(b"".join(buffers))
        packet[byte] ^= 1
        return send_fds(connection, [packet], descriptors)

    with ThroughProxy("shared_memory") as pair:
        monkeypatch.setattr(socket, "send_fds", send_flipped)
        pair.send(0, SMALL)
        assert_lost(pair, 0)


def call_through_proxy(offset, of_reply):
    """The errors that both ends of the driver's connection raise when a bit of a request or reply flips."""
    credentials = make_credentials(False)
    replies, ends, flips = queue.SimpleQueue(), queue.SimpleQueue(), Flips()

    def change(direction, content):
        return flips(direction ^ of_reply, content)

    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as stack:

        def led_through(address):
            return stack.enter_context(Proxy(address, change)).address

        accepted, connection = both_ends(credentials, led_through)
        serving = thread.submit(Server("group 3", accepted).serve, lambda request: request)
        client = Client(connection, replies.put, ends.put)
        client.send(encode(0, ("echo", (SMALL,))))
        replies.get(timeout=SECONDS)
        flips.arm(offset)
        client.send(encode(1, ("echo", (SMALL, LARGE))))
        ended = ends.get(timeout=SECONDS)
        served = serving.exception(SECONDS)
        client.close()
        assert replies.empty()
        return ended if of_reply else served


@pytest.mark.parametrize("of_reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("offset", [0, 5, 15, 21, 30, 45, 1000, 10_000, 800_000])
def test_a_bit_that_flips_in_a_request_or_reply_ends_the_connection_of_the_driver(offset, of_reply):
    error = call_through_proxy(offset, of_reply)
    assert isinstance(error, CorruptedError)
    assert re.search(BOTH_ENDS, str(error))


def test_a_bit_that_flips_in_a_handshake_keeps_nobody_waiting():
    credentials = make_credentials(False)
    for offset in (0, 12, 100, 700, 1000):
        with (
            sockets.ConnectionListener("127.0.0.1", credentials) as listener,
            ThreadPoolExecutor(1) as thread,
        ):
            flips = Flips()
            flips.arm(offset)
            accepting = thread.submit(listener.accept)
            with (
                Proxy(listener.address, flips) as proxy,
                pytest.raises(ConnectionError, match=r"127\.0\.0\.1"),
            ):
                sockets.connect(proxy.address, credentials, SECONDS)
            assert not accepting.done()
            listener.interrupt()
            assert isinstance(accepting.exception(SECONDS), ConnectionError)
