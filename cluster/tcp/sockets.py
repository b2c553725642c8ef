"""TCP connections between processes that have the same credentials, set up so that a lost peer is noticed.

Both ends greet each other first (``cluster.tcp.greeting``), so that nothing of a stranger is interpreted.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from cluster.tcp.connection import Connection, EncryptedConnection
from cluster.tcp.credentials import Credentials, Handshake
from cluster.tcp.greeting import CHALLENGE_BYTES, Greeting, Wait, introduce

UNREACHABLE_SECONDS = 60
"""A peer that acknowledges nothing for this long, or accepts no data, counts as lost."""

_IDLE_SECONDS, _PROBE_SECONDS = 30, 10
"""When a connection is idle, and how often it is probed then: networks drop connections without traffic."""

_GREETING_SECONDS = 5
"""The most that a greeting may take, once it has begun."""

_MAX_GREETINGS = 256
"""How many greetings may be under way; beyond that the oldest is given up that has proven nothing."""


class Address(NamedTuple):
    """Where a ``Listener`` is, and which one it is: no other one can answer in its place."""

    host: str
    port: int
    identity: bytes


class Listener:
    """Accepts connections at a free port of a host from peers with credentials, and from no others.

    All who connect are greeted at the same time. So a stranger that stays silent keeps nobody waiting.

    Args:
      host: the address of this machine to listen at; no other one is open.
    """

    def __init__(self, host: str):
        self._socket = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
        self._socket.setblocking(False)
        host, port = self._socket.getsockname()
        self.address = Address(host, port, secrets.token_bytes(CHALLENGE_BYTES))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._greetings: list[Greeting] = []  # the oldest first
        self._is_interrupted = False

    def accept(self, credentials: Credentials) -> tuple[int, Connection]:
        """Waits for a peer that has the credentials. One thread at a time may call this.

        Returns: the number that the peer has given itself, and the connection.
        Raises: ``ConnectionError`` after ``interrupt``.
        """
        while True:
            self.check()
            for key, _ in self._selector.select(self._seconds_left()):
                if key.data is None:
                    self._greet()
                elif self._is_welcome(key.data, credentials):
                    return key.data.number, _connection(key.data.tcp, key.data.handshake)
            now = time.monotonic()
            for greeting in [greeting for greeting in self._greetings if greeting.deadline <= now]:
                self._refuse(greeting)

    def _seconds_left(self) -> float | None:
        return max(self._greetings[0].deadline - time.monotonic(), 0) if self._greetings else None

    def _greet(self) -> None:
        with contextlib.suppress(OSError):  # who has connected is gone already
            tcp, _ = self._socket.accept()
            if len(self._greetings) >= _MAX_GREETINGS:
                strangers = (greeting for greeting in self._greetings if greeting.handshake is None)
                self._refuse(next(strangers, self._greetings[0]))
            greeting = Greeting(tcp, time.monotonic() + _GREETING_SECONDS, self.address.identity)
            tcp.setblocking(False)
            self._selector.register(tcp, selectors.EVENT_READ, greeting)
            self._greetings.append(greeting)
            tcp.send(greeting.challenge)

    def _is_welcome(self, greeting: Greeting, credentials: Credentials) -> bool:
        """Whether the greeting has come to its good end; strangers are refused."""
        if greeting.tcp.fileno() < 0:
            return False  # given up in the same round
        try:
            if not greeting.proceed(credentials):
                return False
        except OSError:
            self._refuse(greeting)
            return False
        self._forget(greeting)
        return True

    def _forget(self, greeting: Greeting) -> None:
        self._greetings.remove(greeting)
        self._selector.unregister(greeting.tcp)

    def _refuse(self, greeting: Greeting) -> None:
        self._forget(greeting)
        greeting.tcp.close()

    def check(self) -> None:
        """Raises ``ConnectionError`` after ``interrupt``. May be called from any thread."""
        if self._is_interrupted:
            raise ConnectionError("nobody is waited for any more")

    def interrupt(self) -> None:
        """Ends ``accept``, now and later. May be called from any thread, also after ``close``."""
        self._is_interrupted = True
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes who waits

    def close(self) -> None:
        """Closes the port, and the connections of all that were not accepted. May be called again."""
        for greeting in list(self._greetings):
            self._refuse(greeting)
        self._selector.close()
        self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def connect(
    address: Address,
    credentials: Credentials,
    timeout: float,
    number: int = -1,
    check: Callable[[], None] = lambda: None,
) -> Connection:
    """Connects with a ``Listener`` that accepts.

    Args:
      timeout: seconds until the peer begins the greeting, which it may do late. The rest takes a few seconds
        at most.
      number: what this process is to the peer.
      check: is called several times a second, and raises to wait no longer.

    Raises: ``ConnectionError`` when nothing listens at the address, or the peer does not have the credentials
      or is late.
    """
    wait = Wait(time.monotonic() + timeout, check)
    try:
        tcp = socket.socket()
        try:
            tcp.setblocking(False)
            wait.for_connection(tcp, address.host, address.port)
            challenge = wait.for_bytes(tcp, CHALLENGE_BYTES)
            wait = Wait(time.monotonic() + _GREETING_SECONDS, check)
            handshake = introduce(tcp, address.identity, challenge, credentials, number, wait)
            return _connection(tcp, handshake)
        except BaseException:
            tcp.close()
            raise
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error
        raise ConnectionError(f"no connection to {address.host}:{address.port}: {reason}") from error


def _connection(tcp: socket.socket, handshake: Handshake | None) -> Connection:
    tcp.setblocking(True)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (
        ("TCP_KEEPIDLE", _IDLE_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_SECONDS),
        ("TCP_USER_TIMEOUT", UNREACHABLE_SECONDS * 1000),
    ):
        if hasattr(socket, name):  # some systems lack these options
            tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return Connection(tcp) if handshake is None else EncryptedConnection(tcp, handshake.session)
