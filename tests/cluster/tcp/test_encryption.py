"""Whoever sits between two ends can read, change and rearrange nothing."""

import contextlib
import dataclasses
import ssl
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cluster.tcp import sockets
from cluster.tcp.connection import Connection, EncryptedConnection
from cluster.tcp.credentials import Credentials, make_credentials
from tests.cluster.tcp import conftest
from tests.cluster.tcp.conftest import SECONDS, read
from tests.support.proxy import Proxy

CREDENTIALS = dataclasses.replace(conftest.CREDENTIALS, encryption=True)


@contextlib.contextmanager
def both_ends(listener, credentials, address=None):
    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(listener.accept)
        one = sockets.connect(address or listener.address, credentials, SECONDS)
        with one, accepting.result(SECONDS)[1] as other:
            yield one, other


@pytest.mark.parametrize("encryption", [True, False])
def test_what_passes_between_machines_cannot_be_read(listener, encryption):
    text = b"weights and gradients " * 100
    credentials = dataclasses.replace(CREDENTIALS, encryption=encryption)
    with Proxy(listener.address) as proxy, both_ends(listener, credentials, proxy.address) as (one, other):
        for size in (1, 50_000, 1_000_000):
            content = (text * (1 + size // len(text)))[:size]
            for source, sink in ((one, other), (other, one)):
                with ThreadPoolExecutor(1) as thread:
                    writing = thread.submit(
                        source.write, [memoryview(content)[: size // 2], memoryview(content)[size // 2 :]]
                    )
                    assert read(sink, size) == content
                    writing.result(SECONDS)
    assert [text in seen for seen in proxy.seen] == [not encryption] * 2


def test_by_default_what_leaves_the_machine_is_encrypted(listener):
    credentials = dataclasses.replace(CREDENTIALS, encryption=None)
    with both_ends(listener, credentials) as ends:
        assert [type(end) for end in ends] == [Connection] * 2
    # Who connects is 127.0.0.1 here, too.
    with (
        sockets.ConnectionListener("127.0.0.2", credentials) as elsewhere,
        both_ends(elsewhere, credentials) as ends,
    ):
        assert [type(end) for end in ends] == [EncryptedConnection] * 2
        ends[0].write([memoryview(b"hello")])
        assert read(ends[1], 5) == b"hello"


def test_a_peer_with_another_certificate_is_refused(listener, accepted):
    with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        sockets.connect(listener.address, make_credentials(), SECONDS)
    assert not accepted.done()


@pytest.mark.parametrize("shown", ["another certificate", "no certificate"])
def test_the_end_that_accepts_checks_the_certificate_too(monkeypatch, listener, accepted, shown):
    """Also of who does not mind whose certificate it is shown."""
    other = make_credentials()
    make_context = Credentials.context

    def careless(credentials, accepts):
        context = (
            make_context(other, accepts)
            if shown == "another certificate"
            else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context

    with monkeypatch.context() as patch:
        patch.setattr(Credentials, "context", careless)
        with pytest.raises(ConnectionError, match="no connection to"):
            sockets.connect(listener.address, CREDENTIALS, SECONDS)
    assert not accepted.done()


def test_another_listener_cannot_answer_in_place_of_the_one_that_is_meant(listener):
    with ThreadPoolExecutor(1) as thread, sockets.ConnectionListener("127.0.0.1", CREDENTIALS) as meant:
        accepting = thread.submit(listener.accept)
        redirected = meant.address._replace(port=listener.address.port)
        with pytest.raises(ConnectionError, match="another listener answers"):
            sockets.connect(redirected, CREDENTIALS, SECONDS)
        listener.interrupt()
        with pytest.raises(ConnectionError):
            accepting.result(SECONDS)


def test_both_ends_write_and_read_at_the_same_time(listener):
    """Each end has a thread that writes and a thread that reads, which never take turns."""
    numbers = np.random.default_rng(0)
    contents = [numbers.bytes(int(size)) for size in numbers.integers(1, 600_000, 60)]

    def write(connection):
        for content in contents:
            connection.write([memoryview(content)])

    def read_all(connection):
        return b"".join(read(connection, len(content)) for content in reversed(contents))

    with both_ends(listener, CREDENTIALS) as ends, ThreadPoolExecutor(4) as threads:
        writing = [threads.submit(write, end) for end in ends]
        reading = [threads.submit(read_all, end) for end in ends]
        for future in writing:
            future.result(SECONDS)
        assert [future.result(SECONDS) == b"".join(contents) for future in reading] == [True, True]


def test_credentials_do_not_show_what_is_secret():
    assert str(CREDENTIALS) == "Credentials(encryption=True)"
