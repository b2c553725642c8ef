"""A TCP connection between two processes, in clear or encrypted, that two threads use at a time.

Every connection of the project has a thread that reads and one that writes, so that neither end waits for the
other. Records travel (``cluster.tcp.records``), and a record that was changed on the way ends the connection.

A session of TLS is one state that reading and writing share, which OpenSSL does not protect. So an
``EncryptedConnection`` has the session work on memory only, under a lock that no thread holds while it waits
for the network. Encrypted bytes travel in records, too: TLS would wait for a length that was changed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cluster.tcp.records import RecordReader, RecordWriter, divided

_MAX_PIECES = min(os.sysconf("SC_IOV_MAX"), 1024)


class Connection:
    """One end of a TCP connection in clear. One thread may write while another one reads.

    Args:
      tcp: the blocking socket, which ``close`` closes.
      ahead: bytes that were received before.

    Raises: ``OSError`` when the other end is gone.
    """

    def __init__(self, tcp: socket.socket, ahead: bytes = b""):
        self._tcp = tcp
        self._outgoing = RecordWriter()
        self._incoming = RecordReader(tcp, ahead)

    def encoded(self, pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
        """The bytes to write for these, in records, which are made when they are asked for.

        Records have to be written in the order in which they are made.
        """
        return self._outgoing.records(pieces)

    def write_some(self, record: list[memoryview], wait: bool) -> None:
        """Writes as much of a record as one system call takes, and removes it from the front of the list.

        Args:
          wait: whether to wait until the network takes some bytes.

        Raises: ``OSError`` when the connection has ended.
        """
        try:
            written = self._tcp.sendmsg(record[:_MAX_PIECES], [], 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        count = 0
        while count < len(record) and written >= record[count].nbytes:
            written -= record[count].nbytes
            count += 1
        del record[:count]
        if written:
            record[0] = record[0][written:]

    def write(self, pieces: Iterable[memoryview]) -> None:
        """Returns when the network has taken all. After an ``OSError`` the connection must end."""
        for record in self.encoded(pieces):
            while record:
                self.write_some(record, wait=True)

    def read_into(self, buffer: memoryview) -> None:
        """Waits until the buffer is full. One thread at a time may call this.

        Raises: ``EOFError`` or ``OSError`` when the connection has ended, ``CorruptedError``, an ``OSError``,
          when bytes were changed on the way. Then the connection has ended at both ends.
        """
        try:
            self._read_into(buffer)
        except OSError:
            self.end()
            raise

    def _read_into(self, buffer: memoryview) -> None:
        self._incoming.read_into(buffer)

    def end(self) -> None:
        """Ends reading and writing, at both ends. May be called from any thread; ``close`` is still to be."""
        with contextlib.suppress(OSError):  # the connection has ended already
            self._tcp.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the socket back. No thread may use it any more."""
        self._tcp.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Session(NamedTuple):
    """A session of TLS: encrypted bytes arrive in ``incoming``, and leave by ``outgoing``."""

    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO


class EncryptedConnection(Connection):
    def __init__(self, tcp: socket.socket, session: Session):
        # The other end may have sent more at once than the rest of the handshake.
        super().__init__(tcp, session.incoming.read())
        self._session = session
        self._lock = threading.Lock()

    def encoded(self, pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
        for content in divided(pieces):
            plain = content[0] if len(content) == 1 else b"".join(content)
            with self._lock:
                self._session.tls.write(plain)
                encrypted = self._session.outgoing.read()
            yield from super().encoded([memoryview(encrypted)])

    def _read_into(self, buffer: memoryview) -> None:
        """Raises: also ``ssl.SSLError``, an ``OSError``, when somebody has changed the received bytes."""
        while True:
            with self._lock:
                buffer = buffer[self._decrypt_into(buffer) :]
            if not buffer:
                return
            encrypted = self._incoming.read()
            with self._lock:
                self._session.incoming.write(encrypted)

    def _decrypt_into(self, buffer: memoryview) -> int:
        """Decrypts the received bytes that fit in the buffer; a call of OpenSSL returns at most 16 KiB."""
        tls, incoming, _ = self._session
        count = 0
        while count < len(buffer) and (incoming.pending or tls.pending()):
            try:
                count += tls.read(len(buffer) - count, buffer[count:])  # type: ignore[operator]
            except ssl.SSLWantReadError:  # the rest is a part of a record
                break
        return count
