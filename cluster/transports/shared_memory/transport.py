"""The transport by shared memory: connects the groups of one node."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence

from cluster.tcp.credentials import Credentials
from cluster.transports.inbox import Inbox
from cluster.transports.peer_transport import PeerTransport
from cluster.transports.shared_memory.receiver import Receiver
from cluster.transports.shared_memory.sender import Sender
from mpmd.runtime.transport import Array, MessageId

_HELLO = struct.Struct("<i")  # the process that connects


class SharedMemoryTransport(PeerTransport):
    """Exchanges messages with groups of the same node.

    Args:
      inbox: where the messages that arrive go.
      process: the number of this process.
    """

    def __init__(self, inbox: Inbox, process: int):
        super().__init__(inbox)
        self._process = process
        self._listener: socket.socket | None = None
        self._outgoing: dict[int, socket.socket] = {}
        self._incoming: list[socket.socket] = []
        self._watcher: threading.Thread | None = None
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}

    def listen(self, host: str, credentials: Credentials) -> str:
        """The address is the name of a socket. It accepts only processes of the same user."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"mpmd-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(socket.SOMAXCONN)
        return name

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Raises: ``PermissionError`` when a process of another user answers, ``ConnectionError`` when a peer
        has closed its connection."""
        assert self._listener is not None, "connect comes after listen"
        for process, name in addresses.items():
            self._outgoing[process] = self._connect_to(name)
        while len(self._receivers) < len(addresses):
            connection, _ = self._listener.accept()
            if _is_of_this_user(connection):
                self._incoming.append(connection)
                hello = connection.recv(_HELLO.size)
                if not hello:
                    raise ConnectionError("a group has closed its connection as soon as it was made")
                (src,) = _HELLO.unpack(hello)
                self._receivers[src] = Receiver(self._inbox, src, self._process, connection)
            else:
                connection.close()
        self._listener.close()
        self._senders = {
            dst: Sender(self._inbox, self._process, dst, connection)
            for dst, connection in self._outgoing.items()
        }
        self._watcher = threading.Thread(target=self._watch, name="peers of this node", daemon=True)
        self._watcher.start()

    def _connect_to(self, name: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(f"\0{name}")
        if not _is_of_this_user(connection):
            raise PermissionError("a process of another user answers for a process of a group")
        connection.send(_HELLO.pack(self._process))
        return connection

    def _watch(self) -> None:
        """Reports peers whose connections end."""
        peers = {sender.socket.fileno(): process for process, sender in self._senders.items()}
        poll = select.poll()
        for descriptor in peers:
            poll.register(descriptor, 0)  # no events but the end of the connection
        while peers:
            for descriptor, _ in poll.poll():
                poll.unregister(descriptor)
                self._inbox.mark_disconnected(peers.pop(descriptor))

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        self._senders[message.dst].send(message, arrays)

    def trim(self) -> None:
        for sender in self._senders.values():
            sender.trim()

    def interrupt(self) -> None:
        for connection in (self._listener, *self._outgoing.values(), *self._incoming):
            if connection is not None:
                _shut_down(connection)

    def close(self) -> None:
        connections = [*self._outgoing.values(), *self._incoming]
        for connection in connections:
            _shut_down(connection)
        if self._watcher is not None:
            self._watcher.join()
        if self._listener is not None:
            self._listener.close()
        for connection in connections:
            connection.close()
        for sender in self._senders.values():
            sender.close()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        connection.shutdown(socket.SHUT_RDWR)


def _is_of_this_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    _, user, _ = struct.unpack("iII", credentials)
    return user == os.getuid()
