"""Every socket that listens, against who has no credentials: nothing is unpickled, and nobody waits."""

import contextlib
import errno
import os
import pickle
import random
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from cluster.tcp import handshake, sockets
from cluster.tcp import listener as listener_module
from cluster.tcp.credentials import make_credentials
from cluster.tcp.local import LocalAddress, LocalListener, connect_locally
from cluster.tcp.records import RecordWriter
from tests.support.pairs import SECONDS, Pair

ALERT_BYTES = 7
"""Of TLS, for who begins with anything else than a handshake."""
CREDENTIALS = make_credentials(encryption=True)


class Port(NamedTuple):
    """Where a process listens, and what has its peers connect there and exchange something."""

    address: Any
    admit: Callable[[], None]


@contextlib.contextmanager
def of_transport(name):
    with Pair(name) as pair:

        def admit():
            pair.connect().send(0, np.arange(70_000))
            np.testing.assert_array_equal(pair.take(0), [np.arange(70_000)])

        yield Port(pair.addresses[1][name if name == "shared_memory" else "tcp"], admit)


PORTS = {
    "shared memory": lambda: of_transport("shared_memory"),
    "network": lambda: of_transport("network"),
}


class Mark:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def pickles(path):
    """A pickle, alone and as every frame and packet that has ever been one of the project's."""
    pickled = pickle.dumps(Mark(path))
    frame = struct.pack("<QQI", 0, len(pickled), 0) + pickled
    (record,) = RecordWriter().records([memoryview(frame)])
    announced = struct.pack("<BQqi", 0, len(pickled), 0, 0) + pickled
    return [pickled, b"\0" + pickled, struct.pack("<i", 0), frame, b"".join(record), announced]


CONTENTS = {
    "silence": lambda path: [],
    "garbage": lambda path: [random.Random(0).randbytes(size) for size in (4, 69, 101, 30_000)],
    "pickle": pickles,
}


def stranger(address):
    if isinstance(address, LocalAddress):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.connect("\0" + address.name)
    else:
        link = socket.create_connection(address[:2])
    link.settimeout(SECONDS)
    return link


def all_received(link):
    """The bytes that a stranger gets until it is refused, and the number of file descriptors."""
    received, num_descriptors = b"", 0
    with contextlib.suppress(ConnectionError):
        while True:
            part, descriptors, _, _ = socket.recv_fds(link, 10_000, 10)
            num_descriptors += len(descriptors)
            if not part:
                break
            received += part
    return received, num_descriptors


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("port", PORTS.values(), ids=PORTS)
def test_nothing_is_unpickled_and_nobody_waits_for_who_has_no_credentials(
    monkeypatch, tmp_path, port, content
):
    """Strangers that stay, also those that stay silent, and each packet of theirs as the first word."""
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 1000)
    packets = content(tmp_path / "mark")
    with port() as (address, admit), contextlib.ExitStack() as stack:
        strangers = []
        for i in range(max(len(packets), 1)):
            strangers.append(stack.enter_context(stranger(address)))
            with contextlib.suppress(ConnectionError):  # it is refused before it has sent all
                for packet in packets[i:] + packets[:i]:
                    strangers[-1].sendall(packet)
        admit()
        for each in strangers:
            received, num_descriptors = all_received(each)
            assert len(received) <= ALERT_BYTES
            assert num_descriptors == 0
    assert list(tmp_path.iterdir()) == []


def test_a_local_socket_admits_only_who_has_the_credentials():
    with LocalListener(CREDENTIALS) as listener, ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(listener.accept)
        with pytest.raises(ConnectionError, match="other credentials"):
            connect_locally(listener.address, make_credentials(), SECONDS, 3)
        with connect_locally(listener.address, CREDENTIALS, SECONDS, 7) as link:
            number, other = accepting.result(SECONDS)
            with other:
                assert number == 7
                link.send(b"hello")
                assert other.recv(100) == b"hello"


def test_who_connects_to_a_local_socket_that_stays_silent_does_not_wait_forever():
    """Also where more wait than its queue takes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        address = LocalAddress(f"mpmd-test-{os.getpid()}", "identity")
        silent.bind("\0" + address.name)
        silent.listen(0)
        for _ in range(2):  # the first one stays in the queue
            with pytest.raises(ConnectionError, match="no connection to a process of this node: no answer"):
                connect_locally(address, CREDENTIALS, 0.1, 3)
    with pytest.raises(ConnectionError, match="refused"):
        connect_locally(address, CREDENTIALS, 0.1, 3)


class Exhausted:
    """A socket that listens, in a process without free descriptors until ``is_full`` is ``False``."""

    def __init__(self, listening):
        self.listening = listening
        self.is_full = True
        self.num_failed = 0

    def accept(self):
        if self.is_full:
            self.num_failed += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.listening.accept()

    def __getattr__(self, name):
        return getattr(self.listening, name)


@pytest.fixture
def exhausted(monkeypatch):
    """The next socket that listens by TCP."""
    exhausted = Exhausted(socket.create_server(("127.0.0.1", 0)))
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_server", lambda *arguments, **options: exhausted)
        yield exhausted


def test_a_process_without_descriptors_tries_now_and_then_to_accept(exhausted):
    with sockets.ConnectionListener("127.0.0.1", CREDENTIALS) as listener, ThreadPoolExecutor(2) as threads:
        accepting = threads.submit(listener.accept)
        connecting = threads.submit(sockets.connect, listener.address, CREDENTIALS, SECONDS)
        while exhausted.num_failed < 3:
            time.sleep(0.01)
        time.sleep(0.5)
        assert exhausted.num_failed < 100, "it tries all the time"
        assert not accepting.done()
        exhausted.is_full = False
        connecting.result(SECONDS).close()
        accepting.result(SECONDS)[1].close()


def test_a_process_that_stays_without_descriptors_says_so(monkeypatch, exhausted):
    monkeypatch.setattr(listener_module, "_LASTING_SECONDS", 0.2)
    with sockets.ConnectionListener("127.0.0.1", CREDENTIALS) as listener:
        with pytest.raises(ConnectionError, match=r"no connection to 127.0.0.1:\d+: .*(reset|refused)"):
            sockets.connect(listener.address, CREDENTIALS, SECONDS)
        with pytest.raises(ConnectionError, match=r"Too many open files, for 0.2 s") as caught:
            listener.accept()
        assert caught.value.errno == errno.EMFILE
