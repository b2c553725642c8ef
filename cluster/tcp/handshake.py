"""The handshake with which a connection begins: both ends prove that they have the credentials of one launch.

It is TLS 1.3's. Both ends show the launch's certificate and accept no other. The end that connects names the
listener that it means, so nobody can lead it to another listener of the launch. Then it says which process it
is and whether the connection stays encrypted, and the listener confirms. Before the listener has confirmed,
OpenSSL alone interprets what arrives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from cluster.tcp.connection import Session

HANDSHAKE_SECONDS = 5
"""The longest time of a handshake, from its first byte."""

_CHECK_SECONDS = 0.2

_PAUSE_SECONDS = 0.01

_MAX_BYTES = 16 * 1024
"""The most bytes that are received at a time; a packet of a handshake has fewer."""

_CLAIM = struct.Struct("<i?")
"""The number of the process that connects, and whether its connection stays encrypted."""

_CONFIRMATION = b"\1"

T = TypeVar("T")


class AuthenticatedPeer(NamedTuple):
    """The process at the other end, which has the credentials.

    Attributes:
      number: of the process, as it says.
      encrypts: whether the connection stays encrypted.
      session: of TLS; if the connection goes on in clear, bytes may have arrived in ``session.incoming``.
    """

    number: int
    encrypts: bool
    session: Session


@dataclasses.dataclass(frozen=True)
class SocketWait:
    """Waits for sockets that do not block, until a deadline of ``time.monotonic``, or until ``check`` raises.

    ``check`` is called several times a second.
    """

    deadline: float
    check: Callable[[], None]

    def until(self, link: socket.socket, event: int) -> None:
        poll = select.poll()
        poll.register(link, event)
        while not poll.poll(max(min(self.deadline - time.monotonic(), _CHECK_SECONDS), 0) * 1000):
            self._check()

    def pause(self) -> None:
        """Waits ``_PAUSE_SECONDS``, for a condition that no event of a socket reports."""
        self._check()
        time.sleep(_PAUSE_SECONDS)

    def _check(self) -> None:
        self.check()
        if time.monotonic() >= self.deadline:
            raise TimeoutError("timed out")


def authenticate(link: socket.socket, context: ssl.SSLContext, wait: SocketWait) -> AuthenticatedPeer:
    """The handshake of the end that listens.

    Args:
      link: the socket, a stream or one of packets, which does not block.
      context: of the end that accepts.

    Raises: ``OSError`` when the other end does not have the credentials, is late, or is gone.
    """
    session = _session(context, server_side=True)

    def confirm() -> bytes:
        session.tls.do_handshake()
        claim = session.tls.read(_CLAIM.size)
        session.tls.write(_CONFIRMATION)
        return claim

    number, encrypts = _CLAIM.unpack(_perform(link, session, confirm, wait))
    return AuthenticatedPeer(number, encrypts, session)


def request(
    link: socket.socket, context: ssl.SSLContext, identity: str, number: int, encrypts: bool, wait: SocketWait
) -> Session:
    """The handshake of the end that connects. Returns the session, from which ``encrypts`` goes on.

    Args:
      identity: of the listener.
      number: of this process.
      wait: for the listener's first byte. The rest takes ``HANDSHAKE_SECONDS`` at most.

    Raises: ``OSError`` when the other end does not have the credentials, or what ``wait`` raises.
    """
    session = _session(context, server_hostname=identity)
    with contextlib.suppress(ssl.SSLWantReadError):
        session.tls.do_handshake()
    _send(link, session)
    wait.until(link, select.POLLIN)
    wait = SocketWait(time.monotonic() + HANDSHAKE_SECONDS, wait.check)

    def claim() -> None:
        session.tls.do_handshake()
        session.tls.write(_CLAIM.pack(number, encrypts))

    _perform(link, session, claim, wait)
    _perform(link, session, lambda: session.tls.read(len(_CONFIRMATION)), wait)
    return session


def _session(context: ssl.SSLContext, **options: Any) -> Session:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    return Session(context.wrap_bio(incoming, outgoing, **options), incoming, outgoing)


def _perform(link: socket.socket, session: Session, operation: Callable[[], T], wait: SocketWait) -> T:
    """Repeats an operation of TLS after each packet that arrives, until it is done, and sends its output.

    Messages of one operation travel together: the system delays small packets that follow one another.
    """
    while True:
        try:
            return operation()
        except ssl.SSLWantReadError:
            pass
        finally:
            _send(link, session)
        wait.until(link, select.POLLIN)
        if not (received := link.recv(_MAX_BYTES)):
            raise ConnectionError("the other end has closed the connection")
        session.incoming.write(received)


def _send(link: socket.socket, session: Session) -> None:
    """Sends at once: a handshake fits in the empty buffer of a socket."""
    content = session.outgoing.read()
    if content and link.send(content) < len(content):
        raise ConnectionError("the other end does not take what it is sent")
