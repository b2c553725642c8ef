"""Messages between devices, across nodes too: by ``jax.experimental.transfer``.

The sender offers a message's arrays to its transfer server, and tells the reader over a connection of the two
processes. The reader's thread pulls them at once, while the program may still compute; whoever reads them
waits until they are there. Values that fit into a packet go with what is told.

Two things about the transfer server shape this. An array that is offered is pulled or stays alive, so all
that is told is pulled, also when its step was aborted. And a pull from a peer that is not there, or for what
was never offered, waits for ever, so nothing is pulled that was not told, and a peer that dies ends the
pulls from it by closing the connection. The server encrypts nothing and knows no users: numbers that
cannot be guessed are all that protects what is offered. The connections take only peers that know a secret.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import numpy as np

from cluster import sockets
from cluster.transports.inbox import Inbox
from cluster.transports.window import Window
from cluster.wire import Packed, pack, unpack
from mpmd.ir import Spec
from mpmd.runtime.transport import Array, MessageId
from mpmd.sharding import spec_of, to_sharding

_PACKET_BYTES = 16 * 1024
"""Messages up to this size, if they are in the host's memory anyway, are told and not pulled."""

_CHUNK_BYTES = 4 * 2**20
_CHUNKS = 8

_HELLO = struct.Struct("<i")  # who it is that connects

_DIAL_SECONDS = 60

_GONE_SECONDS = 1.0
"""Within this, a connection that has broken is known to have."""


class Address(NamedTuple):
    """Where a group can be reached: its transfer server, and where it takes connections."""

    server: str
    connections: tuple[str, int]


class _Value(NamedTuple):
    """An array that is offered: it has the same spec over the reader's submesh as over the sender's."""

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: Spec


class _Offer(NamedTuple):
    """A message whose arrays wait at the sender's transfer server, under a number."""

    message: MessageId
    number: int
    values: tuple[_Value, ...]


class _Packet(NamedTuple):
    """A message that is small."""

    message: MessageId
    values: tuple[Packed, ...]


_TAKEN = None
"""What the reader tells when it has taken a message."""


class DeviceTransport:
    """One group's end of its edges by transfer servers: a ``Carrier``.

    Args:
      inbox: where what arrives goes.
      mpmd_idx: the group.
      submesh: its devices; those of the peers have the same shape.
    """

    def __init__(self, inbox: Inbox, mpmd_idx: int, submesh: jax.sharding.Mesh):
        self._inbox = inbox
        self._mpmd_idx = mpmd_idx
        self._submesh = submesh
        self._in_host_memory = submesh.devices.flat[0].platform == "cpu"
        self._numbers = itertools.count(secrets.randbits(62))
        self._peers: dict[int, _Peer] = {}

    def listen(self, host: str, secret: bytes) -> Address:
        from jax.experimental import transfer  # which cannot be imported where JAX lacks it

        self._secret = secret
        self._server = transfer.start_transfer_server(
            self._submesh.devices.flat[0].client,
            f"{host}:0",
            [f"{host}:0"],
            max_num_parallel_copies=_CHUNKS,
            transfer_size=_CHUNK_BYTES,
        )
        self._listener = sockets.listen(host)
        return Address(self._server.address(), self._listener.getsockname())

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """Raises: ``ConnectionError`` when a peer is not there."""
        # From the last one down, which takes connections first: so nobody waits for a chain of others.
        later = sorted((peer for peer in addresses if peer > self._mpmd_idx), reverse=True)
        with self._listener:
            for mpmd_idx in later:
                tcp = sockets.dial(addresses[mpmd_idx].connections, self._secret, _DIAL_SECONDS)
                tcp.sendall(_HELLO.pack(self._mpmd_idx))
                self._peers[mpmd_idx] = self._peer(mpmd_idx, addresses[mpmd_idx], tcp)
            while self._peers.keys() != addresses.keys():
                tcp = sockets.accept(self._listener, self._secret)
                hello = tcp.recv(_HELLO.size, socket.MSG_WAITALL)
                if len(hello) < _HELLO.size:
                    raise ConnectionError("a group has closed its connection as soon as it was made")
                (mpmd_idx,) = _HELLO.unpack(hello)
                self._peers[mpmd_idx] = self._peer(mpmd_idx, addresses[mpmd_idx], tcp)
        for peer in self._peers.values():
            peer.reader.start()
            peer.confirmer.start()

    def _peer(self, mpmd_idx: int, address: Address, tcp: socket.socket) -> _Peer:
        return _Peer(self._inbox, self._submesh, mpmd_idx, self._server.connect(address.server), tcp)

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        peer = self._peers[message.dst]
        peer.wait_for_window(message.step)
        if self._in_host_memory and sum(array.nbytes for array in arrays) <= _PACKET_BYTES:
            peer.tell_of(_Packet(message, tuple(pack(np.asarray(array)) for array in arrays)))
        else:
            peer.tell_of(self._offer(message, arrays))

    def _offer(self, message: MessageId, arrays: Sequence[Array]) -> _Offer:
        number = next(self._numbers)
        specs = [
            () if isinstance(array, np.ndarray) else spec_of(array.sharding, self._submesh, array.ndim)
            for array in arrays
        ]
        # Copies, because the caller may donate what it has sent.
        shardings = [to_sharding(spec, self._submesh) for spec in specs]
        offered = jax.device_put(list(arrays), shardings, may_alias=False)
        if pulled := [array for array in offered if array.nbytes]:  # nobody is told when nothing has arrived
            self._server.await_pull(number, pulled)
        values = (_Value(a.shape, a.dtype, spec) for a, spec in zip(offered, specs, strict=True))
        return _Offer(message, number, tuple(values))

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


class _Peer:
    """The connection to one peer, in both directions, and the thread that listens to it."""

    def __init__(
        self,
        inbox: Inbox,
        submesh: jax.sharding.Mesh,
        mpmd_idx: int,
        server: Any,
        tcp: socket.socket,
    ):
        self.inbox = inbox
        self.mpmd_idx = mpmd_idx
        self.gone = threading.Event()
        self.reader = threading.Thread(target=self._read, name=f"from group {mpmd_idx}", daemon=True)
        self.confirmer = threading.Thread(target=self._confirm, name=f"to group {mpmd_idx}", daemon=True)
        self._confirmations: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._submesh = submesh
        self._server = server
        self._socket = tcp
        self._connection = Connection(os.dup(tcp.fileno()))
        self._telling = threading.Lock()
        self._window = Window()
        self._taken = 0

    def wait_for_window(self, step: int) -> None:
        self.inbox.wait(step, lambda: self._window.admits(step, self._taken))

    def tell_of(self, told: _Packet | _Offer) -> None:
        if self.gone.is_set() or not self._told(told):
            self.inbox.wait(told.message.step, lambda: False)
        self._window.note_sent()

    def tell_taken(self) -> None:
        """In a thread of its own: whoever reads must not wait for the peer to read."""
        self._confirmations.put(True)

    def _confirm(self) -> None:
        while self._confirmations.get():
            self._told(_TAKEN)  # if the peer is gone, its end of the window is too

    def _told(self, what: object) -> bool:
        try:
            with self._telling:
                self._connection.send(what)
        except OSError:  # the reader will find out, too
            return False
        return True

    def _read(self) -> None:
        try:
            while True:
                self._hear(self._connection.recv())
                self.inbox.wake()
        except (EOFError, OSError):
            pass
        finally:
            self.gone.set()
            self.inbox.lose(self.mpmd_idx)

    def _hear(self, told: _Packet | _Offer | None) -> None:
        match told:
            case _Packet(message, values):
                self.inbox.add(message, _ArrivedPacket(self, values))
            case _Offer(message, number, values):
                try:
                    self.inbox.add(message, _Pulled(self, message, self._pull(number, values)))
                except jax.errors.JaxRuntimeError as error:  # there is no room for it
                    self.tell_taken()
                    reason = f"group {message.dst} could not receive from group {message.src}: {error}"
                    self.inbox.abort(message.step, reason)
            case None:
                self._taken += 1

    def _pull(self, number: int, values: Sequence[_Value]) -> list[jax.Array]:
        wanted = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=to_sharding(spec, self._submesh))
            for shape, dtype, spec in values
        ]
        pulled = iter(self._server.pull(number, [a for a in wanted if math.prod(a.shape)]))
        return [
            next(pulled) if math.prod(a.shape) else jax.device_put(np.zeros(a.shape, a.dtype), a.sharding)
            for a in wanted
        ]

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the peer has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._confirmations.put(False)
        self.reader.join()
        self.confirmer.join()
        self._socket.close()
        self._connection.close()


class _ArrivedPacket(NamedTuple):
    peer: _Peer
    values: Sequence[Packed]

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[np.ndarray]:
        self.peer.tell_taken()
        return [unpack(packed) for packed in self.values]

    def drop(self) -> None:
        self.peer.tell_taken()


class _Pulled(NamedTuple):
    """A message whose arrays are on their way."""

    peer: _Peer
    message: MessageId
    arrays: Sequence[jax.Array]

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[jax.Array]:
        try:
            jax.block_until_ready(self.arrays)
        except jax.errors.JaxRuntimeError as error:
            self.peer.tell_taken()
            if self.peer.gone.wait(_GONE_SECONDS):
                self.peer.inbox.wait(self.message.step, lambda: False)
            src, tag = self.message.src, self.message.tag
            raise RuntimeError(f"message {tag} of group {src} was lost on the way: {error}") from error
        self.peer.tell_taken()
        return [
            array if array.sharding == sharding else jax.device_put(array, sharding)
            for array, sharding in zip(self.arrays, shardings, strict=True)
        ]

    def drop(self) -> None:
        self.peer.tell_taken()
