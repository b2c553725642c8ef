"""The transport by shared memory: connects the groups of one node."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Mapping

from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials
from cluster.tcp.handshake import SocketWait
from cluster.tcp.local import LocalAddress, LocalListener, connect_locally
from cluster.transports.connections import CONNECT_SECONDS, connect_peers
from cluster.transports.inbox import ProcessInbox
from cluster.transports.peer_transport import PeerTransport
from cluster.transports.shared_memory.receiver import Receiver
from cluster.transports.shared_memory.sender import Sender
from cluster.transports.shared_memory.slots import allocate, map_step


class SharedMemoryTransport(PeerTransport):
    def __init__(self, inbox: ProcessInbox, process: int):
        super().__init__(inbox)
        self._process = process
        self._listener: LocalListener | None = None
        self._connections: dict[int, socket.socket] = {}
        self._watcher: threading.Thread | None = None
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._step: memoryview | None = None  # of this process; senders read it

    def listen(self, host: str, credentials: Credentials) -> LocalAddress:
        listener = self._listener = LocalListener(credentials)
        return listener.address

    def connect(
        self, addresses: Mapping[int, LocalAddress], connections: Mapping[int, Connection]
    ) -> Mapping[int, Sender]:
        assert self._listener is not None, "connect comes after listen"
        self._connections = connect_peers(self._listener, connect_locally, self._process, addresses)
        step_fd = allocate(mmap.PAGESIZE)
        try:
            self._step = map_step(step_fd)
            for peer, connection in self._connections.items():
                self._receivers[peer] = Receiver(self._inbox, peer, self._process, connection, step_fd)
        finally:
            os.close(step_fd)
        wait = SocketWait(time.monotonic() + CONNECT_SECONDS, self._listener.check)
        for peer, connection in self._connections.items():
            self._senders[peer] = self._sender(peer, connection, wait)
        self._watcher = threading.Thread(target=self._watch, name="peers of this node", daemon=True)
        self._watcher.start()
        return self._senders

    def _sender(self, peer: int, connection: socket.socket, wait: SocketWait) -> Sender:
        try:
            wait.until(connection, select.POLLIN)
            return Sender(self._inbox, self._process, peer, connection)
        except (TimeoutError, EOFError, ConnectionResetError) as error:
            name = self._inbox.name_of(peer)
            raise ConnectionError(f"{name} has not said where its inbox is: {error}") from error

    def _watch(self) -> None:
        peers = {connection.fileno(): process for process, connection in self._connections.items()}
        poll = select.poll()
        for descriptor in peers:
            poll.register(descriptor, 0)  # no events but the end of the connection
        while peers:
            for descriptor, _ in poll.poll():
                poll.unregister(descriptor)
                self._inbox.mark_disconnected(peers.pop(descriptor))

    def begin_step(self, step: int) -> None:
        if self._step is not None:
            self._step[0] = step

    def trim(self) -> None:
        for sender in self._senders.values():
            sender.trim()

    def interrupt(self) -> None:
        if self._listener is not None:
            self._listener.interrupt()

    def close(self) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # the other end has closed it
                connection.shutdown(socket.SHUT_RDWR)
        if self._watcher is not None:
            self._watcher.join()
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections.values():
            connection.close()
        for sender in self._senders.values():
            sender.close()
