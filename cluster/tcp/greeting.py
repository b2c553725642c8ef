"""The greeting with which a connection begins, as both ends see it.

The end that listens sends a challenge. The end that connects answers with a challenge of its own, its number,
and a proof that it knows the secret. The listening end replies with its proof. A proof is an HMAC of all
bytes sent so far, of the listener's identity and of the end's role. Every part has a fixed length, so nothing
that a stranger sends is interpreted before it is proven.

If the end that connects says so, a handshake of TLS follows. The session has a name that is derived from the
greeting, so that nobody between the ends can join the session of one connection to the greeting of another.
"""

from __future__ import annotations

import dataclasses
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from cluster.tcp.credentials import Credentials, Handshake

_CHECK_SECONDS = 0.2
"""The seconds between two checks of an end that connects that its connection is still needed."""

_PAUSE_SECONDS = 0.01
"""The pause before a process tries again to connect, where the other end has a full queue."""

_GREETING_SECONDS = 5
"""The most that a greeting may take, once it has begun."""

CHALLENGE_BYTES = 32
"""Of a challenge that nobody can guess."""

_PROOF_BYTES = 32

_CLAIM = struct.Struct("<i?")
"""The end that connects: its number, and whether it wants to encrypt."""

_ANSWER_BYTES = CHALLENGE_BYTES + _CLAIM.size

_MAX_HANDSHAKE_BYTES = 16 * 1024
"""More than one end sends in a handshake."""


class _Transcript(NamedTuple):
    """The words of both ends of a connection in a greeting.

    Attributes:
      identity: the identity of the listener.
      challenge: the challenge of the end that listens.
      answer: the challenge of the end that connects, and its claim.
    """

    identity: bytes
    challenge: bytes
    answer: bytes

    def proof(self, secret: bytes, role: bytes) -> bytes:
        return hmac.digest(secret, role + b"".join(self), "sha256")

    def session_name(self, secret: bytes) -> str:
        return self.proof(secret, b"session ").hex()[:32]


@dataclasses.dataclass
class Greeting:
    """A greeting under way, at the end that listens.

    Attributes:
      link: the socket, a stream or one of packets; each message of a greeting fits in a packet.
      identity: the listener's.
      number, handshake: what the peer is, and the handshake that follows, if any, once it is proven.
    """

    link: socket.socket
    identity: bytes
    challenge: bytes = dataclasses.field(default_factory=lambda: secrets.token_bytes(CHALLENGE_BYTES))
    received: bytes = b""
    begun: float = dataclasses.field(default_factory=time.monotonic)
    number: int = 0
    handshake: Handshake | None = None

    @property
    def deadline(self) -> float:
        """The time, by ``time.monotonic``, at which it is given up."""
        return self.begun + _GREETING_SECONDS

    def proceed(self, credentials: Credentials) -> bool:
        """Reads received bytes. Returns whether the peer has proven its claim and got this end's proof.

        Raises: ``OSError`` when the peer cannot prove its claim, or is gone.
        """
        expected = _ANSWER_BYTES + _PROOF_BYTES
        most = expected - len(self.received) if self.handshake is None else _MAX_HANDSHAKE_BYTES
        received = self.link.recv(most)
        if not received:
            raise ConnectionError("the other end has closed the connection")
        if self.handshake is not None:
            return self._shake_hands(self.handshake, received)
        self.received += received
        return len(self.received) == expected and self._welcome(credentials)

    def _welcome(self, credentials: Credentials) -> bool:
        answer, proof = self.received[:_ANSWER_BYTES], self.received[_ANSWER_BYTES:]
        transcript = _Transcript(self.identity, self.challenge, answer)
        if not hmac.compare_digest(proof, transcript.proof(credentials.secret, b"connects")):
            raise ConnectionError("the other end does not know the secret")
        self.number, encrypts = _CLAIM.unpack(answer[CHALLENGE_BYTES:])
        _send_at_once(self.link, transcript.proof(credentials.secret, b"listens"))
        if encrypts:
            name = transcript.session_name(credentials.secret)
            self.handshake = Handshake(credentials, name, accepts=True)
        return not encrypts

    def _shake_hands(self, handshake: Handshake, received: bytes) -> bool:
        try:
            return handshake.proceed(received)
        finally:
            _send_at_once(self.link, handshake.to_send())


@dataclasses.dataclass(frozen=True)
class Wait:
    """Waits, for a socket that does not block, until a deadline, or until ``check`` raises.

    ``check`` is called several times a second.
    """

    deadline: float
    check: Callable[[], None]

    def until(self, link: socket.socket, event: int) -> None:
        poll = select.poll()
        poll.register(link, event)
        while not poll.poll(max(min(self.deadline - time.monotonic(), _CHECK_SECONDS), 0) * 1000):
            self._go_on()

    def pause(self) -> None:
        """Sleeps for a short time, where no event reports that the wait is over."""
        self._go_on()
        time.sleep(_PAUSE_SECONDS)

    def _go_on(self) -> None:
        self.check()
        if time.monotonic() >= self.deadline:
            raise TimeoutError("timed out")

    def for_some(self, link: socket.socket, most: int) -> bytes:
        self.until(link, select.POLLIN)
        if not (received := link.recv(most)):
            raise ConnectionError("the other end has closed the connection, as it does if the secrets differ")
        return received

    def for_bytes(self, link: socket.socket, num_bytes: int) -> bytes:
        received = b""
        while len(received) < num_bytes:
            received += self.for_some(link, num_bytes - len(received))
        return received


def introduce(
    link: socket.socket,
    identity: bytes,
    credentials: Credentials,
    number: int,
    encrypts: bool,
    wait: Wait,
) -> Handshake | None:
    """The greeting of the end that connects. Returns TLS's handshake, which is done, if it encrypts.

    Args:
      identity: of the listener.
      number: what this process is to the peer.
      encrypts: whether a handshake of TLS follows.
      wait: until the peer begins. The rest takes a few seconds at most.

    Raises: ``OSError`` when the peer does not have the credentials, or what ``wait`` raises.
    """
    challenge = wait.for_bytes(link, CHALLENGE_BYTES)
    wait = Wait(time.monotonic() + _GREETING_SECONDS, wait.check)
    answer = secrets.token_bytes(CHALLENGE_BYTES) + _CLAIM.pack(number, encrypts)
    transcript = _Transcript(identity, challenge, answer)
    _send_at_once(link, answer + transcript.proof(credentials.secret, b"connects"))
    proof = wait.for_bytes(link, _PROOF_BYTES)
    if not hmac.compare_digest(proof, transcript.proof(credentials.secret, b"listens")):
        raise ConnectionError("what answers there does not know the secret")
    if not encrypts:
        return None
    handshake = Handshake(credentials, transcript.session_name(credentials.secret), accepts=False)
    is_done = handshake.proceed()
    _send_at_once(link, handshake.to_send())
    while not is_done:
        is_done = handshake.proceed(wait.for_some(link, _MAX_HANDSHAKE_BYTES))
        _send_at_once(link, handshake.to_send())
    return handshake


def _send_at_once(link: socket.socket, content: bytes) -> None:
    """Sends at once: a greeting fits in the empty buffer of a socket."""
    if link.send(content) < len(content):
        raise ConnectionError("the other end does not take what it is sent")
