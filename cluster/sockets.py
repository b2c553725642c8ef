"""TCP connections on which a peer that is gone is noticed."""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing.connection import Connection

_UNREACHABLE_SECONDS = 60
"""A peer that confirms nothing of what it is sent for so long is gone, with its node or the way to it."""


def socket_of(connection: Connection) -> socket.socket:
    """The socket of a TCP connection, another descriptor of it, that sends at once whatever it is given."""
    tcp = socket.socket(fileno=os.dup(connection.fileno()))
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREACHABLE_SECONDS * 1000)
    return tcp
