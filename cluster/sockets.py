"""TCP connections between processes that know a secret, on which a peer that is gone is noticed."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

_UNREACHABLE_SECONDS = 60
"""A peer that confirms nothing of what it is sent for so long, or takes none of it, is gone or stuck."""

_IDLE_SECONDS, _PROBE_SECONDS = 30, 10
"""When nothing is sent, the peer is probed so often: networks forget connections that are silent for long."""

_GREETING_SECONDS = 20
"""For so long whoever connects may take for each thing it has to say to show that it knows the secret."""

Address = tuple[str, int]


def listen(host: str) -> socket.socket:
    """A socket that takes connections at a free port of ``host``."""
    return socket.create_server((host, 0), backlog=socket.SOMAXCONN)


def accept(listener: socket.socket, secret: bytes) -> socket.socket:
    """Waits for a peer that knows the secret. Others are refused, also when they are silent for long.

    Raises: ``OSError`` when the listener is closed.
    """
    while True:
        tcp, _ = listener.accept()
        # Of a stranger: a wrong answer, none in time, no more than a probe of the port, or another protocol.
        with contextlib.suppress(AuthenticationError, EOFError, OSError):
            _set_timeout(tcp, _GREETING_SECONDS)
            with _connection(tcp) as greeting:
                deliver_challenge(greeting, secret)
                answer_challenge(greeting, secret)
            return _ready(tcp)
        tcp.close()


def dial(address: Address, secret: bytes, timeout: float) -> socket.socket:
    """Connects with a peer that listens and will ``accept``.

    Raises: ``ConnectionError`` when nobody is there, or somebody else, or who is there says nothing for
      ``timeout`` seconds.
    """
    try:
        tcp = socket.create_connection(address, timeout)
        try:
            _set_timeout(tcp, timeout)
            with _connection(tcp) as greeting:
                answer_challenge(greeting, secret)
                deliver_challenge(greeting, secret)
            return _ready(tcp)
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
        case AssertionError():  # as multiprocessing takes a greeting that is none
            return "something else answers there"
    return str(error)


def _connection(tcp: socket.socket) -> Connection:
    return Connection(os.dup(tcp.fileno()))


def _set_timeout(tcp: socket.socket, seconds: float) -> None:
    """Limits each sending and receiving; 0 is no limit. Python's own timeouts would not reach duplicates."""
    tcp.setblocking(True)
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _ready(tcp: socket.socket) -> socket.socket:
    _set_timeout(tcp, 0)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (
        ("TCP_KEEPIDLE", _IDLE_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_SECONDS),
        ("TCP_USER_TIMEOUT", _UNREACHABLE_SECONDS * 1000),
    ):
        if hasattr(socket, name):  # not everywhere
            tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return tcp
