"""Objects and file descriptors, sent over a Unix socket of packets (``SOCK_SEQPACKET``)."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

_INLINE_BYTES = 32 * 1024
"""Larger pickles go through memory: the system limits the size of a packet."""

_MAX_DESCRIPTORS = 3

_INLINE, _IN_MEMORY = b"\0", b"\1"
"""The first byte of a packet: the pickle follows, or is in the memory of the first descriptor."""


class Announcement(NamedTuple):
    """One packet, which may be sent repeatedly until the socket accepts it."""

    packet: bytes
    descriptors: tuple[int, ...]

    def send(self, connection: socket.socket) -> None:
        """Raises ``OSError`` as ``socket.sendmsg`` does."""
        socket.send_fds(connection, [self.packet], self.descriptors)


@contextlib.contextmanager
def announcement(content: object, *descriptors: int) -> Iterator[Announcement]:
    """An object of any size, and at most two descriptors, which stay the caller's."""
    pickled = pickle.dumps(content)
    if len(pickled) <= _INLINE_BYTES:
        yield Announcement(_INLINE + pickled, descriptors)
        return
    with open(os.memfd_create("mpmd"), "wb") as memory:
        memory.write(pickled)
        memory.flush()
        yield Announcement(_IN_MEMORY, (memory.fileno(), *descriptors))


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Waits for an announcement. Returns the object, and the descriptors, which the caller has to close."""
    packet, descriptors, flags, _ = socket.recv_fds(connection, 1 + _INLINE_BYTES, _MAX_DESCRIPTORS)
    if flags & socket.MSG_CTRUNC:
        raise RuntimeError("this process has too many open files to share memory with another group")
    assert not flags & socket.MSG_TRUNC, "an announcement is longer than its sender may make it"
    if packet[:1] == _INLINE:
        return pickle.loads(packet[1:]), descriptors
    with open(descriptors.pop(0), "rb") as memory:
        memory.seek(0)  # the sender's position in it is shared, too
        return pickle.load(memory), descriptors
