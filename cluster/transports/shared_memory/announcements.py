"""Bytes and file descriptors, sent over a Unix socket of packets (``SOCK_SEQPACKET``)."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from cluster.protocol.digests import CorruptedError, digest_of

_INLINE_BYTES = 32 * 1024
"""More goes through memory: the system limits the size of a packet."""

_MAX_DESCRIPTORS = 3

_HEAD = struct.Struct("<?Q")
"""The head of a packet: whether the content is in the memory of the first descriptor, and its digest."""


class Announcement(NamedTuple):
    """One packet, which may be sent repeatedly until the socket accepts it."""

    packet: bytes
    descriptors: tuple[int, ...]

    def send(self, connection: socket.socket) -> None:
        socket.send_fds(connection, [self.packet], self.descriptors)


@contextlib.contextmanager
def announcement(content: bytes, *descriptors: int) -> Iterator[Announcement]:
    """Any number of bytes, and at most two descriptors, which stay the caller's."""
    is_in_memory = len(content) > _INLINE_BYTES
    head = _HEAD.pack(is_in_memory, digest_of(content, is_in_memory))
    if not is_in_memory:
        yield Announcement(head + content, descriptors)
        return
    with open(os.memfd_create("mpmd"), "wb") as memory:
        memory.write(content)
        memory.flush()
        yield Announcement(head, (memory.fileno(), *descriptors))


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The next announcement: the content, and the descriptors, which the caller has to close.

    Raises: ``EOFError`` when the other end is closed, ``CorruptedError`` when it was changed on the way,
      ``OSError`` when nothing has arrived, or no descriptor was free for it. Then it is lost.
    """
    packet, descriptors, flags, _ = socket.recv_fds(connection, _HEAD.size + _INLINE_BYTES, _MAX_DESCRIPTORS)
    try:
        if flags & socket.MSG_CTRUNC:
            reason = "this process has too many open files to share memory with another group"
            raise OSError(errno.EMFILE, reason)
        assert not flags & socket.MSG_TRUNC, "an announcement is longer than its sender may make it"
        if not packet:
            raise EOFError("the other end has closed the connection")
        is_in_memory, digest = _HEAD.unpack_from(packet)
        content = packet[_HEAD.size :]
        if is_in_memory and descriptors:
            with open(descriptors[0], "rb", closefd=False) as memory:
                memory.seek(0)  # the sender's position in it is shared, too
                content = memory.read()
        if digest_of(content, is_in_memory) != digest:
            raise CorruptedError("an announcement of shared memory was changed on the way")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    if is_in_memory:
        os.close(descriptors.pop(0))
    return content, descriptors
