"""Records: how bytes travel over a connection, so that none that was changed on the way is ever delivered.

A record is a head and its content. The head has the length of the content, its digest, and a digest of the
head itself, which also depends on the number of the record. So a reader never believes a length that was
changed, which it would wait for, and notices a record that is missing, or comes twice.
"""

from __future__ import annotations

import io
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from cluster.protocol.digests import CorruptedError, digest_of, digest_of_all

_RECORD_BYTES = 256 * 1024
"""The most that a record has. It stays in a processor's cache from its digest until it is sent, and from its
arrival until its digest."""

_LARGE_BYTES = 64 * 1024
"""Larger pieces have records of their own, which are received where their reader wants them."""

_AHEAD_BYTES = 16 * 1024
"""The bytes that are received at a time where few are asked for, and copied from there.

A small message fits; of a large record, only the beginning is copied."""

_HEAD = struct.Struct("<IQ")  # the bytes of the content, and its digest
_DIGEST = struct.Struct("<Q")  # of the head
_HEAD_BYTES = _HEAD.size + _DIGEST.size


class RecordWriter:
    """Makes the records of one direction of a connection; they have to be sent in the order in which they are
    made."""

    def __init__(self) -> None:
        self._number = 0

    def records(self, pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
        for content in divided(pieces):
            head = _HEAD.pack(sum(piece.nbytes for piece in content), digest_of_all(content))
            sealed = head + _DIGEST.pack(digest_of(head, self._number))
            self._number += 1
            yield [memoryview(sealed), *content]


def divided(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The contents of records: small pieces together, large ones alone, and in several records."""
    small: list[memoryview] = []
    num_bytes = 0
    for piece in pieces:
        if small and num_bytes + piece.nbytes > _LARGE_BYTES:
            yield small
            small, num_bytes = [], 0
        if piece.nbytes > _LARGE_BYTES:
            for start in range(0, piece.nbytes, _RECORD_BYTES):
                yield [piece[start : start + _RECORD_BYTES]]
        elif piece.nbytes:
            small.append(piece)
            num_bytes += piece.nbytes
    if small:
        yield small


class _Received(io.RawIOBase):
    """The bytes that a socket receives. ``socket.makefile`` would keep the socket from being closed."""

    def __init__(self, tcp: socket.socket):
        self._tcp = tcp

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._tcp.recv_into(buffer)


class RecordReader:
    """Receives the records of one direction, in one thread. ``ahead`` are bytes that were received before."""

    def __init__(self, tcp: socket.socket, ahead: bytes = b""):
        self._stream = io.BufferedReader(_Received(tcp), _AHEAD_BYTES)
        self._ways = "{}:{} to {}:{}".format(*tcp.getpeername(), *tcp.getsockname())
        self._number = 0
        self._ahead = memoryview(ahead)
        self._record = memoryview(bytearray(_RECORD_BYTES))
        self._rest = self._record[:0]  # of the last record, which nobody has asked for yet

    def read(self) -> memoryview:
        """Waits for the content of the next record, in memory that the following record overwrites.

        Raises: ``EOFError`` or ``OSError`` when the connection has ended, ``CorruptedError`` when the record
          was changed on the way, or is not the next in order.
        """
        return self._read_content(self._record, *self._read_head())

    def read_into(self, buffer: memoryview) -> None:
        """Waits until the buffer is full, of as many records as that takes. Raises as ``read``."""
        while buffer:
            if not self._rest:
                num_bytes, digest = self._read_head()
                if num_bytes <= buffer.nbytes:
                    self._read_content(buffer, num_bytes, digest)
                    buffer = buffer[num_bytes:]
                    continue
                self._rest = self._read_content(self._record, num_bytes, digest)
            count = min(len(self._rest), len(buffer))
            buffer[:count] = self._rest[:count]
            self._rest, buffer = self._rest[count:], buffer[count:]

    def _read_head(self) -> tuple[int, int]:
        head = bytearray(_HEAD_BYTES)
        self._receive(memoryview(head))
        if _DIGEST.pack(digest_of(head[: _HEAD.size], self._number)) != head[_HEAD.size :]:
            raise self._corrupted("head")
        num_bytes, digest = _HEAD.unpack_from(head)
        return num_bytes, digest

    def _read_content(self, memory: memoryview, num_bytes: int, digest: int) -> memoryview:
        content = memory[:num_bytes]
        self._receive(content)
        if digest_of(content) != digest:
            raise self._corrupted("content")
        self._number += 1
        return content

    def _corrupted(self, what: str) -> CorruptedError:
        return CorruptedError(f"the {what} of record {self._number} from {self._ways} was changed on the way")

    def _receive(self, buffer: memoryview) -> None:
        if self._ahead:
            count = min(len(self._ahead), len(buffer))
            buffer[:count], self._ahead = self._ahead[:count], self._ahead[count:]
            buffer = buffer[count:]
        if self._stream.readinto(buffer) < len(buffer):
            raise EOFError("the other end has closed the connection")
