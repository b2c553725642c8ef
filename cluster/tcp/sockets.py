"""TCP connections between processes that have the same credentials, set up so that a lost peer is noticed."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable
from typing import NamedTuple

from cluster.tcp import listener
from cluster.tcp.connection import Connection, EncryptedConnection, Session
from cluster.tcp.credentials import Credentials
from cluster.tcp.handshake import AuthenticatedPeer, request
from cluster.tcp.listener import connecting

UNREACHABLE_SECONDS = 60
"""A peer that acknowledges nothing for this long, or accepts no data, counts as lost."""

_IDLE_SECONDS, _PROBE_SECONDS = 30, 10
"""The seconds without traffic until a probe is sent, and between probes: networks drop idle connections."""


class Address(NamedTuple):
    host: str
    port: int
    identity: str


class ConnectionListener(listener.Listener[Connection]):
    """Accepts connections at a free port of ``host`` from peers that have the credentials."""

    def __init__(self, host: str, credentials: Credentials):
        server = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
        host, port = server.getsockname()
        super().__init__(server, credentials)
        self.address = Address(host, port, self.identity)

    def _open(self, link: socket.socket, peer: AuthenticatedPeer) -> Connection:
        return _connection(link, peer.encrypts, peer.session)


def connect(
    address: Address,
    credentials: Credentials,
    timeout: float,
    number: int = -1,
    check: Callable[[], None] = lambda: None,
) -> Connection:
    """Connects with a ``ConnectionListener``.

    Args:
      timeout: seconds until the listener answers, which may be late. The rest takes a few seconds at most.
      number: what this process is to the peer.
      check: is called several times a second, and raises to wait no longer.

    Raises: ``ConnectionError`` when nothing listens at the address, or the peer does not have the credentials
      or is late.
    """
    tcp = socket.socket()
    with connecting(tcp, f"{address.host}:{address.port}", timeout, check) as wait:
        with contextlib.suppress(BlockingIOError):
            tcp.connect((address.host, address.port))
        wait.until(tcp, select.POLLOUT)
        if error := tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        encrypts = credentials.encryption
        if encrypts is None:  # what a machine sends to itself, does not leave it
            encrypts = tcp.getsockname()[0] != tcp.getpeername()[0]
        context = credentials.context(accepts=False)
        session = request(tcp, context, address.identity, number, encrypts, wait)
        return _connection(tcp, encrypts, session)


def _connection(tcp: socket.socket, encrypts: bool, session: Session) -> Connection:
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
    return EncryptedConnection(tcp, session) if encrypts else Connection(tcp, session.incoming.read())
