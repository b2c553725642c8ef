"""Unix sockets of packets between processes of one machine that have the same credentials.

They carry file descriptors. Their names are abstract, so nothing remains in a file system.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import NamedTuple

from cluster.tcp.credentials import Credentials
from cluster.tcp.handshake import AuthenticatedPeer, request
from cluster.tcp.listener import Listener, connecting


class LocalAddress(NamedTuple):
    name: str
    identity: str


class LocalListener(Listener[socket.socket]):
    """Accepts connections of this machine from peers that have the credentials, as non-blocking sockets."""

    def __init__(self, credentials: Credentials) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"mpmd-{secrets.token_hex(16)}"
        listening.bind(f"\0{name}")
        listening.listen(socket.SOMAXCONN)
        super().__init__(listening, credentials)
        self.address = LocalAddress(name, self.identity)

    def _open(self, link: socket.socket, peer: AuthenticatedPeer) -> socket.socket:
        return link


def connect_locally(
    address: LocalAddress,
    credentials: Credentials,
    timeout: float,
    number: int,
    check: Callable[[], None] = lambda: None,
) -> socket.socket:
    """Connects with a ``LocalListener``, as ``cluster.tcp.sockets.connect`` does by TCP.

    Returns: the socket, which does not block.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with connecting(link, "a process of this node", timeout, check) as wait:
        while True:
            try:
                link.connect(f"\0{address.name}")
                break
            except BlockingIOError:  # more wait there than its queue takes
                wait.pause()
        request(link, credentials.context(accepts=False), address.identity, number, False, wait)
        return link
