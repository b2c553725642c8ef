"""Who is let in at a port, and who keeps nobody waiting there."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.tcp import handshake, sockets
from cluster.tcp import listener as listener_module
from cluster.transports.connections import connect_peers
from tests.cluster.tcp.conftest import CREDENTIALS, SECONDS, read

ALERT_BYTES = 7


def stranger(address):
    return socket.create_connection(address[:2], SECONDS)


def is_refused(tcp):
    """Whether the other end closes the connection; before that it sends an alert of TLS at most."""
    received = b""
    try:
        while part := tcp.recv(1000):
            received += part
    except ConnectionResetError:
        pass
    return len(received) <= ALERT_BYTES


def test_silent_connections_keep_nobody_waiting_for_longer_than_their_handshakes(monkeypatch):
    """40 silent connections, of which 16 at a time may have a thread for their handshake."""
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(listener_module, "_MAX_HANDSHAKES", 16)
    with sockets.ConnectionListener("127.0.0.1", CREDENTIALS) as listener, contextlib.ExitStack() as stack:
        before = threading.active_count()
        for _ in range(40):
            stack.enter_context(stranger(listener.address))
        sockets.connect(listener.address, CREDENTIALS, SECONDS).close()
        assert threading.active_count() <= before + 16
        listener.accept()[1].close()


def test_a_handshake_as_a_whole_takes_a_limited_time(monkeypatch, listener, accepted):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.5)
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(505)
    with stranger(listener.address) as slow:
        stop, sent = threading.Event(), []

        def drip():
            for byte in hello:
                if stop.wait(0.1):
                    return
                try:
                    sent.append(slow.send(bytes([byte])))
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert is_refused(slow)
        stop.set()
        dripping.join()
        assert len(sent) < len(hello), "it has sent a whole message"


def test_a_listener_goes_on_when_the_system_has_refused_it_a_thread(monkeypatch, listener, accepted):
    start, refused = threading.Thread.start, []

    def refuse_once(thread):
        if thread.name == "handshake" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    with pytest.raises(ConnectionError):
        sockets.connect(listener.address, CREDENTIALS, 1)
    sockets.connect(listener.address, CREDENTIALS, SECONDS).close()
    assert refused and accepted.result(SECONDS)


def test_a_listener_that_is_interrupted_accepts_nobody_now_and_later():
    with sockets.ConnectionListener("127.0.0.1", CREDENTIALS) as listener, ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(listener.accept)
        with stranger(listener.address) as silent:
            listener.interrupt()
            with pytest.raises(ConnectionError, match="nobody is waited for any more"):
                accepting.result(SECONDS)
            with pytest.raises(ConnectionError, match="nobody is waited for any more"):
                listener.accept()
            listener.interrupt()
            listener.close()
            assert is_refused(silent)
        listener.close()
        listener.interrupt()


def test_who_waits_for_a_peer_in_vain_closes_the_connections_that_it_has():
    """Process 1 is connected with 2, and waits for 0."""
    with sockets.ConnectionListener("127.0.0.1", CREDENTIALS) as later, ThreadPoolExecutor(2) as threads:
        listener = sockets.ConnectionListener("127.0.0.1", CREDENTIALS)
        accepting = threads.submit(later.accept)
        addresses = {0: listener.address, 2: later.address}
        connecting = threads.submit(connect_peers, listener, sockets.connect, 1, addresses)
        number, connection = accepting.result(SECONDS)
        with connection:
            assert number == 1
            listener.interrupt()
            with pytest.raises(ConnectionError, match="nobody is waited for any more"):
                connecting.result(SECONDS)
            with pytest.raises(EOFError):
                read(connection, 1)


def test_connecting_to_a_peer_that_does_not_answer_fails():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        address = sockets.Address(host, port, "identity")
        with pytest.raises(ConnectionError, match=f"no connection to {host}:{port}: no answer"):
            sockets.connect(address, CREDENTIALS, 0.2)
    with pytest.raises(ConnectionError, match=f"no connection to {host}:{port}: .*refused"):
        sockets.connect(address, CREDENTIALS, 0.2)


def test_a_peer_that_is_stopped_in_the_middle_of_its_handshake_is_not_waited_for(monkeypatch):
    """However long its first word may take."""
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        address = sockets.Address(*server.getsockname(), "identity")
        connecting = thread.submit(sockets.connect, address, CREDENTIALS, 1000)
        with server.accept()[0] as peer:
            peer.sendall(b"\x16\x03\x03\x00\x7a")  # the head of a record of TLS
            with pytest.raises(ConnectionError, match="no answer"):
                connecting.result(SECONDS)


def test_to_interrupt_a_listener_ends_the_connecting_with_peers_too():
    """Process 0 has to connect with 1, which is stopped, before it accepts."""
    listener = sockets.ConnectionListener("127.0.0.1", CREDENTIALS)
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as thread:
        stopped = sockets.Address(*silent.getsockname(), "identity")
        connecting = thread.submit(connect_peers, listener, sockets.connect, 0, {1: stopped})
        time.sleep(0.1)
        assert not connecting.done()
        listener.interrupt()
        with pytest.raises(ConnectionError, match="nobody is waited for any more"):
            connecting.result(SECONDS)
