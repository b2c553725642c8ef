"""TCP connections between processes that share a secret, set up so that a lost peer is noticed.

A connection begins with a greeting: the end that listens sends a challenge; the other one answers with a
challenge of its own and a proof that it knows the secret; the first one replies with its proof. A proof is an
HMAC of both challenges and the end's role. Every part has a fixed length, so nothing that a stranger sends is
interpreted before it is proven.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import secrets
import selectors
import socket
import time

UNREACHABLE_SECONDS = 60
"""A peer that acknowledges nothing for this long, or accepts no data, counts as lost."""

_IDLE_SECONDS, _PROBE_SECONDS = 30, 10
"""When a connection is idle, and how often it is probed then: networks drop connections without traffic."""

_GREETING_SECONDS = 5
"""The most that a greeting may take, once it has begun."""

_MAX_GREETINGS = 256
"""How many greetings may be under way; beyond that the oldest is given up."""

_CHALLENGE_BYTES = _PROOF_BYTES = 32

Address = tuple[str, int]
"""Host and port."""


def _proof(secret: bytes, role: bytes, challenge: bytes, answer: bytes) -> bytes:
    return hmac.digest(secret, role + challenge + answer, "sha256")


@dataclasses.dataclass
class _Greeting:
    """A greeting under way, at the end that listens."""

    tcp: socket.socket
    deadline: float
    challenge: bytes = dataclasses.field(default_factory=lambda: secrets.token_bytes(_CHALLENGE_BYTES))
    answer: bytes = b""

    def proceed(self, secret: bytes) -> bool:
        """Reads what has arrived; whether the peer has proven that it knows the secret, and got our proof.

        Raises: ``OSError`` when it cannot prove it, or is gone.
        """
        received = self.tcp.recv(_CHALLENGE_BYTES + _PROOF_BYTES - len(self.answer))
        if not received:
            raise ConnectionError("the other end has closed the connection")
        self.answer += received
        if len(self.answer) < _CHALLENGE_BYTES + _PROOF_BYTES:
            return False
        challenge, proof = self.answer[:_CHALLENGE_BYTES], self.answer[_CHALLENGE_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"connects", self.challenge, challenge)):
            raise ConnectionError("the other end does not know the secret")
        self.tcp.send(_proof(secret, b"listens", self.challenge, challenge))  # fits in the empty buffer
        return True


class Listener:
    """Accepts connections at a free port of a host from peers that know a secret, and from no others.

    All who connect are greeted at the same time. So a stranger that stays silent keeps nobody waiting.

    Args:
      host: the address of this machine to listen at; no other one is open.
    """

    def __init__(self, host: str):
        self._socket = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
        self._socket.setblocking(False)
        self.address: Address = self._socket.getsockname()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._greetings: list[_Greeting] = []  # the oldest first
        self._is_interrupted = False

    def accept(self, secret: bytes) -> socket.socket:
        """Waits for a peer that knows the secret. One thread at a time may call this.

        Raises: ``ConnectionError`` after ``interrupt``.
        """
        while True:
            if self._is_interrupted:
                raise ConnectionError("nobody is waited for any more")
            for key, _ in self._selector.select(self._seconds_left()):
                if key.data is None:
                    self._greet()
                elif self._is_welcome(key.data, secret):
                    return _configured(key.data.tcp)
            now = time.monotonic()
            for greeting in [greeting for greeting in self._greetings if greeting.deadline <= now]:
                self._refuse(greeting)

    def _seconds_left(self) -> float | None:
        return max(self._greetings[0].deadline - time.monotonic(), 0) if self._greetings else None

    def _greet(self) -> None:
        with contextlib.suppress(OSError):  # who has connected is gone already
            tcp, _ = self._socket.accept()
            if len(self._greetings) >= _MAX_GREETINGS:
                self._refuse(self._greetings[0])
            greeting = _Greeting(tcp, time.monotonic() + _GREETING_SECONDS)
            tcp.setblocking(False)
            self._selector.register(tcp, selectors.EVENT_READ, greeting)
            self._greetings.append(greeting)
            tcp.send(greeting.challenge)

    def _is_welcome(self, greeting: _Greeting, secret: bytes) -> bool:
        """Whether the greeting has come to its good end; strangers are refused."""
        if greeting.tcp.fileno() < 0:
            return False  # given up in the same round
        try:
            if not greeting.proceed(secret):
                return False
        except OSError:
            self._refuse(greeting)
            return False
        self._forget(greeting)
        return True

    def _forget(self, greeting: _Greeting) -> None:
        self._greetings.remove(greeting)
        self._selector.unregister(greeting.tcp)

    def _refuse(self, greeting: _Greeting) -> None:
        self._forget(greeting)
        greeting.tcp.close()

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


def connect(address: Address, secret: bytes, timeout: float) -> socket.socket:
    """Connects with a ``Listener`` that accepts.

    Raises: ``ConnectionError`` when nothing listens at the address, the peer does not know the secret, or it
      has not greeted within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    try:
        tcp = socket.create_connection(address, timeout)
        try:
            challenge = _receive(tcp, _CHALLENGE_BYTES, deadline)
            answer = secrets.token_bytes(_CHALLENGE_BYTES)
            tcp.sendall(answer + _proof(secret, b"connects", challenge, answer))
            proof = _receive(tcp, _PROOF_BYTES, deadline)
            if not hmac.compare_digest(proof, _proof(secret, b"listens", challenge, answer)):
                raise ConnectionError("what answers there does not know the secret")
            return _configured(tcp)
        except BaseException:
            tcp.close()
            raise
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error
        raise ConnectionError(f"no connection to {address[0]}:{address[1]}: {reason}") from error


def _receive(tcp: socket.socket, num_bytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < num_bytes:
        if (remaining := deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        tcp.settimeout(remaining)
        if not (part := tcp.recv(num_bytes - len(received))):
            raise ConnectionError("the other end has closed the connection, as it does if the secrets differ")
        received += part
    return received


def _configured(tcp: socket.socket) -> socket.socket:
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
    return tcp
