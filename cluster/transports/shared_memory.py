"""Messages between groups of one node: values in memory that both map, headers through a pipe.

An edge has, from its sender to its reader,

- slots: anonymous memory, each slot for one message at a time, made when none is free;
- the pipe of the reader's inbox, to which all its senders write a header of fixed size for each message;
- a socket, over which the descriptors of slots and the layouts of messages travel before they are used, and
  whose end tells that a process is gone;
- a counter that the reader keeps in shared memory, of the messages it has taken.

Everything is anonymous or abstract: nothing has a name in a file system, and nothing outlives the processes.
A value is copied once, from the sender's buffer to the slot. The reader's executables take it where it is.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cluster.transports.inbox import HEADER, Inbox
from cluster.transports.slots import Chunk, Layout, Signature, Slot, layout_of, shared_memory
from cluster.transports.window import Window
from mpmd.runtime.transport import Array, MessageId

_FORGET = -1
"""In the place of a tag: the sender has given up the slot."""

_LOOK_SECONDS = 2e-4
"""After this, then less often, a sender that waits for its reader looks whether it has caught up."""

_HELLO = struct.Struct("<i")  # who it is that connects
_ANNOUNCEMENT_BYTES = 2**17


class SharedMemoryTransport:
    """One group's end of its edges to groups of the same node: a ``Carrier``.

    Args:
      inbox: where what arrives goes.
      mpmd_idx: the group.
    """

    def __init__(self, inbox: Inbox, mpmd_idx: int):
        self._inbox = inbox
        self._mpmd_idx = mpmd_idx
        self._listener: socket.socket | None = None
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}

    def listen(self, host: str, secret: bytes) -> str:
        """The address is the name of a socket, which takes processes of this user only."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"mpmd-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(socket.SOMAXCONN)
        return name

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Raises: ``PermissionError`` when a process of another user answers."""
        assert self._listener is not None, "connect comes after listen"
        sockets = {mpmd_idx: self._dial(name) for mpmd_idx, name in addresses.items()}
        while len(self._incoming) < len(addresses):
            connection, _ = self._listener.accept()
            if _same_user(connection):
                incoming = _Incoming(self._inbox, self._mpmd_idx, connection)
                self._incoming[incoming.src] = incoming
            else:
                connection.close()
        self._listener.close()
        self._outgoing = {i: _Outgoing(self._inbox, self._mpmd_idx, i, s) for i, s in sockets.items()}
        self._watcher = threading.Thread(target=self._watch, name="peers of this node", daemon=True)
        self._watcher.start()

    def _dial(self, name: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(f"\0{name}")
        if not _same_user(connection):
            raise PermissionError("a process of another user answers for a group")
        connection.send(_HELLO.pack(self._mpmd_idx))
        return connection

    def _watch(self) -> None:
        """Notices which peers are gone."""
        peers = {outgoing.socket.fileno(): mpmd_idx for mpmd_idx, outgoing in self._outgoing.items()}
        poll = select.poll()
        for descriptor in peers:
            poll.register(descriptor, 0)  # what is reported always: the other end was closed
        while peers:
            for descriptor, _ in poll.poll():
                poll.unregister(descriptor)
                self._inbox.lose(peers.pop(descriptor))

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        self._outgoing[message.dst].send(message, arrays)

    def trim(self) -> None:
        """Gives back the slots that no message is in; what is still needed is made again."""
        for outgoing in self._outgoing.values():
            outgoing.trim()

    def close(self) -> None:
        sockets = [edge.socket for edge in self._outgoing.values()]
        sockets += [edge.socket for edge in self._incoming.values()]
        for connection in sockets:
            connection.shutdown(socket.SHUT_RDWR)
        self._watcher.join()
        for connection in sockets:
            connection.close()
        for outgoing in self._outgoing.values():
            outgoing.close()


class _Outgoing:
    """The sender's end of an edge."""

    def __init__(self, inbox: Inbox, src: int, dst: int, connection: socket.socket):
        self._inbox = inbox
        self._src = src
        self._dst = dst
        self._window = Window()
        self._layouts: dict[Signature, Layout] = {}
        self._slots: dict[int, list[Slot]] = {}  # by size
        self._num_slots = 0
        self.socket = connection
        _, (self._pipe, counter) = _hear(connection)
        self._taken = _counter(counter)
        os.close(counter)
        connection.setblocking(False)

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        step = message.step
        if not self._window.admits(step, self._taken[0]):
            self._wait(step, lambda: self._window.admits(step, self._taken[0]))
        layout = self._layout(step, tuple([(array.dtype, array.shape) for array in arrays]))
        slot = self._free_slot(step, layout.size)
        try:
            for destination, array in zip(slot.occupy(layout), arrays, strict=True):
                _copy(array, destination)
            header = HEADER.pack(self._src, message.tag, step, slot.number, layout.number)
            if not self._written(header):
                self._wait(step, lambda: self._written(header))
        except BaseException:
            slot.release()
            raise
        self._window.note_sent()

    def _wait(self, step: int, done: Callable[[], bool]) -> None:
        self._inbox.wait(step, done, _LOOK_SECONDS)

    def _layout(self, step: int, signature: Signature) -> Layout:
        layout = self._layouts.get(signature)
        if layout is None:
            self._wait(step, lambda: self._announced(signature))
            self._layouts[signature] = layout = layout_of(len(self._layouts), signature)
        return layout

    def _free_slot(self, step: int, size: int) -> Slot:
        slots = self._slots.setdefault(size, [])
        for slot in slots:  # from the front, so that the same few are used, and stay in the caches
            if slot.free:
                return slot
        chunk = Chunk.of(size)
        try:
            descriptor = shared_memory(chunk.nbytes)
            try:
                added = chunk.slots(descriptor, self._num_slots)
                self._wait(step, lambda: self._announced(chunk, descriptor))
            finally:
                os.close(descriptor)
        except OSError as error:
            shared = f"{chunk.nbytes} bytes of memory to share with group {self._dst}"
            raise RuntimeError(f"group {self._src} has no {shared}: {error}") from error
        self._num_slots += len(added)
        slots.extend(added)
        return added[0]

    def _announced(self, content: object, *descriptors: int) -> bool:
        """Tells the reader of what later headers refer to; false as for ``_written``."""
        try:
            _tell(self.socket, content, *descriptors)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS, errno.EPIPE, errno.ECONNRESET):
                raise
            return False
        return True

    def _written(self, header: bytes) -> bool:
        """Writes to the reader's inbox; false when that is full, or the reader is gone."""
        try:
            os.write(self._pipe, header)
        except (BlockingIOError, BrokenPipeError):
            return False
        return True

    def close(self) -> None:
        os.close(self._pipe)

    def trim(self) -> None:
        for size, slots in self._slots.items():
            self._slots[size] = [slot for slot in slots if not self._forgotten(slot)]

    def _forgotten(self, slot: Slot) -> bool:
        return slot.free and self._written(HEADER.pack(self._src, _FORGET, 0, slot.number, 0))


class _Incoming:
    """The reader's end of an edge."""

    def __init__(self, inbox: Inbox, dst: int, connection: socket.socket):
        self._inbox = inbox
        self._dst = dst
        self.socket = connection
        self._layouts: list[Layout] = []
        self._slots: dict[int, Slot] = {}
        self._num_slots = 0
        self._taking = threading.Lock()
        (self.src,) = _HELLO.unpack(connection.recv(_HELLO.size))
        counter = shared_memory(mmap.PAGESIZE)
        self._taken = _counter(counter)
        _tell(connection, None, inbox.mouth, counter)
        os.close(counter)
        inbox.listen(self.src, self._arrived)

    def _arrived(self, tag: int, step: int, slot: int, layout: int) -> None:
        while slot >= self._num_slots or layout >= len(self._layouts):
            self._learn()
        if tag == _FORGET:
            del self._slots[slot]
        else:
            arrived = _Arrived(self, self._slots[slot], self._layouts[layout])
            self._inbox.add(MessageId(step, self.src, self._dst, tag), arrived)

    def _learn(self) -> None:
        content, descriptors = _hear(self.socket)
        if not descriptors:
            self._layouts.append(layout_of(len(self._layouts), content))
        for descriptor in descriptors:
            added = content.slots(descriptor, self._num_slots)
            os.close(descriptor)
            self._slots |= {slot.number: slot for slot in added}
            self._num_slots += len(added)

    def note_taken(self) -> None:
        with self._taking:
            self._taken[0] += 1


class _Arrived(NamedTuple):
    """A message in its slot."""

    edge: _Incoming
    slot: Slot
    layout: Layout

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[np.ndarray]:
        values = self.slot.lend(self.layout)
        self.edge.note_taken()
        return values

    def drop(self) -> None:
        self.slot.release()
        self.edge.note_taken()


def _copy(array: Array, destination: np.ndarray) -> None:
    if isinstance(array, np.ndarray) or array.is_fully_replicated:
        destination[...] = np.asarray(array)
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            destination[shard.index] = np.asarray(shard.data)


def _tell(connection: socket.socket, content: object, *descriptors: int) -> None:
    socket.send_fds(connection, [pickle.dumps(content)], descriptors)


def _hear(connection: socket.socket) -> tuple[Any, list[int]]:
    content, descriptors, flags, _ = socket.recv_fds(connection, _ANNOUNCEMENT_BYTES, 2)
    if flags & socket.MSG_CTRUNC:
        raise RuntimeError("this process has too many open files to share memory with another group")
    return pickle.loads(content), descriptors


def _counter(descriptor: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    _, user, _ = struct.unpack("iII", credentials)
    return user == os.getuid()
