"""TCP connections between processes that share a secret, set up so that a lost peer is noticed."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

_UNREACHABLE_SECONDS = 60
"""A peer that acknowledges nothing for this long, or accepts no data, counts as lost."""

_IDLE_SECONDS, _PROBE_SECONDS = 30, 10
"""When a connection is idle, and how often it is probed then: networks drop connections without traffic."""

_HANDSHAKE_SECONDS = 20
"""The most that a peer may take for each message of the handshake."""

Address = tuple[str, int]
"""Host and port."""


def listen(host: str) -> socket.socket:
    """A socket that accepts connections at a free port of ``host``."""
    return socket.create_server((host, 0), backlog=socket.SOMAXCONN)


def accept(listener: socket.socket, secret: bytes) -> socket.socket:
    """Waits for a peer that knows the secret. Other peers are refused, also those that stay silent.

    Raises: ``OSError`` when the listener is closed.
    """
    while True:
        tcp, _ = listener.accept()
        # A foreign peer answers wrongly or not in time, only probes the port, or speaks another protocol.
        with contextlib.suppress(AuthenticationError, EOFError, OSError):
            _set_timeout(tcp, _HANDSHAKE_SECONDS)
            with _message_connection(tcp) as handshake:
                deliver_challenge(handshake, secret)
                answer_challenge(handshake, secret)
            return _configured(tcp)
        tcp.close()


def connect(address: Address, secret: bytes, timeout: float) -> socket.socket:
    """Connects with a peer that listens, and that calls ``accept``.

    Raises: ``ConnectionError`` when nothing listens at the address, the peer does not know the secret, or it
      does not answer for ``timeout`` seconds.
    """
    try:
        tcp = socket.create_connection(address, timeout)
        try:
            _set_timeout(tcp, timeout)
            with _message_connection(tcp) as handshake:
                answer_challenge(handshake, secret)
                deliver_challenge(handshake, secret)
            return _configured(tcp)
        except BaseException:
            tcp.close()
            raise
    except (AuthenticationError, AssertionError, EOFError, OSError) as error:
        raise ConnectionError(f"no connection to {address[0]}:{address[1]}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    match error:
        case BlockingIOError():
            return "no answer"
        case EOFError():
            return "the other end has closed the connection"
        case AssertionError():  # what multiprocessing raises for a message that is no challenge
            return "something else answers there"
    return str(error)


def _message_connection(tcp: socket.socket) -> Connection:
    return Connection(os.dup(tcp.fileno()))


def _set_timeout(tcp: socket.socket, seconds: float) -> None:
    """Limits each send and receive; 0 is no limit. Python's own timeouts do not apply to duplicates."""
    tcp.setblocking(True)
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _configured(tcp: socket.socket) -> socket.socket:
    _set_timeout(tcp, 0)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (
        ("TCP_KEEPIDLE", _IDLE_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_SECONDS),
        ("TCP_USER_TIMEOUT", _UNREACHABLE_SECONDS * 1000),
    ):
        if hasattr(socket, name):  # some systems lack these options
            tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return tcp
