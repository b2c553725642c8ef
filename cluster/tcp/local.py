"""Unix sockets of packets between processes of one machine that have the same credentials.

They carry file descriptors. Their names are abstract, so nothing remains in a file system.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import NamedTuple

from cluster.tcp.admission import Admission, connecting
from cluster.tcp.credentials import Credentials
from cluster.tcp.greeting import Greeting, introduce


class LocalAddress(NamedTuple):
    """The name of a ``LocalListener``'s socket, and the listener's identity, which no other one has."""

    name: str
    identity: bytes


class LocalListener(Admission[socket.socket]):
    """Accepts connections from processes of this machine that have the credentials.

    Accepted sockets do not block.
    """

    def __init__(self) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"mpmd-{secrets.token_hex(16)}"
        listening.bind(f"\0{name}")
        listening.listen(socket.SOMAXCONN)
        super().__init__(listening)
        self.address = LocalAddress(name, self.identity)

    def _admitted(self, greeting: Greeting) -> socket.socket:
        assert greeting.handshake is None, "what does not leave the machine is not encrypted"
        return greeting.link


def connect_locally(
    address: LocalAddress,
    credentials: Credentials,
    timeout: float,
    number: int,
    check: Callable[[], None] = lambda: None,
) -> socket.socket:
    """Connects with a ``LocalListener`` that accepts, as ``cluster.tcp.sockets.connect`` does by TCP.

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
        introduce(link, address.identity, credentials, number, False, wait)
        return link
