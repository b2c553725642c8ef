"""A few bytes and file descriptors, sent over a Unix socket of packets (``SOCK_SEQPACKET``)."""

from __future__ import annotations

import errno
import os
import socket
import struct

from cluster.protocol.digests import CorruptedError, digest_of

_MAX_BYTES = 64
_MAX_DESCRIPTORS = 2
_DIGEST = struct.Struct("<Q")  # of the content, which follows


def send(connection: socket.socket, content: bytes, *descriptors: int) -> None:
    """Sends one packet. The descriptors stay the caller's. Raises ``OSError`` when the socket is full."""
    socket.send_fds(connection, [_DIGEST.pack(digest_of(content)), content], descriptors)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The next announcement: the content, and the descriptors, which the caller has to close.

    Raises: ``EOFError`` when the other end is closed, ``CorruptedError`` when it was changed on the way,
      ``OSError`` when nothing has arrived, or no descriptor was free for it. Then it is lost.
    """
    packet, descriptors, flags, _ = socket.recv_fds(connection, _MAX_BYTES, _MAX_DESCRIPTORS)
    digest, content = packet[: _DIGEST.size], packet[_DIGEST.size :]
    try:
        if flags & socket.MSG_CTRUNC:
            reason = "this process has too many open files to share memory with another group"
            raise OSError(errno.EMFILE, reason)
        if not packet:
            raise EOFError("the other end has closed the connection")
        if _DIGEST.pack(digest_of(content)) != digest:
            raise CorruptedError("an announcement of shared memory was changed on the way")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return content, descriptors
