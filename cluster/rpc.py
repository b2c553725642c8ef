"""Calls of the driver on a group over a TCP connection: requests one way, replies the other, in order.

Calls of Ray would do, and do where nothing but Ray leads to a group. But each takes as much processor time as
several small tasks, in the driver and again in the actor.

A message is a number, a pickle, and the large buffers that it refers to, which are written from where they
are and read to where they stay. Both ends know a secret; what they write is not encrypted.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import ray

from cluster.sockets import Address, accept, listen

_LARGE_BYTES = 64 * 1024
"""Buffers above this size are not copied into the pickle."""

_MOST_BYTES = 2**30
"""No more is written or read at once: not every system takes as much as Python can name."""

_HEAD = struct.Struct("<QQI")  # the number, bytes of the pickle, and how many buffers follow it
_SIZE = struct.Struct("<Q")

Buffer = bytes | memoryview


class Frame(NamedTuple):
    """A message on its way: a pickle, and the large buffers beside it, of the sender or of the reader."""

    number: int
    content: Buffer
    buffers: tuple[memoryview, ...]

    def open(self) -> Any:
        """What the message says. Raises what unpickling it raises."""
        return pickle.loads(self.content, buffers=self.buffers)


def frame(number: int, message: object) -> Frame:
    """Readies a message to be written. Raises what pickling it raises."""
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes > _LARGE_BYTES:
            large.append(view)
            return False
        return True

    content = ray.cloudpickle.dumps(message, protocol=5, buffer_callback=is_small)
    return Frame(number, content, tuple(large))


class Connection:
    """One end. One thread may write while another one reads.

    Args:
      tcp: its socket, which it closes.
    """

    def __init__(self, tcp: socket.socket):
        self._socket = tcp

    def write(self, message: Frame) -> None:
        """Returns when the network has taken the message. Raises ``OSError``: then ``end`` it."""
        number, content, buffers = message
        head = _HEAD.pack(number, len(content), len(buffers))
        sizes = [_SIZE.pack(view.nbytes) for view in buffers]
        for view in (memoryview(b"".join([head, *sizes, content])), *buffers):
            for start in range(0, view.nbytes, _MOST_BYTES):
                self._socket.sendall(view[start : start + _MOST_BYTES])

    def read(self) -> Frame:
        """Waits for a message; its buffers are the reader's own.

        Raises: ``EOFError`` or ``OSError`` when the connection has ended.
        """
        number, num_bytes, num_buffers = _HEAD.unpack(self._filled(_HEAD.size))
        sizes = [size for (size,) in _SIZE.iter_unpack(self._filled(num_buffers * _SIZE.size))]
        content = self._filled(num_bytes)
        return Frame(number, content, tuple([self._filled(size) for size in sizes]))

    def _filled(self, num_bytes: int) -> memoryview:
        buffer = np.empty(num_bytes, np.uint8).data
        left = buffer
        while left:
            received = self._socket.recv_into(left[:_MOST_BYTES])
            if not received:
                raise EOFError("the other end has closed the connection")
            left = left[received:]
        return buffer

    def end(self) -> None:
        """Ends it on both sides, whoever is reading or writing; ``close`` is still to be called."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class Client:
    """The driver's end: sends requests while nobody waits for the network, and hands on what comes back.

    Args:
      connection: that with a group's ``Server``.
      replied: is given each reply, in the order of the requests.
      ended: is told, at least once, that the connection has ended, and why.
    """

    def __init__(
        self, connection: Connection, replied: Callable[[Frame], None], ended: Callable[[BaseException], None]
    ):
        self._connection = connection
        self._replied = replied
        self._ended = ended
        self._requests: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"mpmd {name}", daemon=True)
            for work, name in ((self._send, "requests"), (self._receive, "replies"))
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, request: Frame) -> None:
        """Sends a request, after those before."""
        self._requests.put(request)

    def _send(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._connection.write(request)
            except Exception as error:  # whatever it is, half a request may be on its way
                self._ended(error)
                self._connection.end()
            del request  # an idle thread must not keep the last request's arrays

    def _receive(self) -> None:
        try:
            while True:
                self._replied(self._connection.read())
        except Exception as error:  # whatever it is, the rest of the reply is still to come
            self._ended(error)
            self._connection.end()

    def end(self) -> None:
        """Ends the connection; does not wait, and may be called by the garbage collector, at any point."""
        self._connection.end()

    def close(self) -> None:
        """Ends the connection and the threads."""
        self._connection.end()
        self._requests.put(None)
        for thread in self._threads:
            thread.join()
        self._connection.close()


class Server:
    """A group's end: takes the requests of one driver, as they come, and answers them in order.

    Args:
      name: of the group, for the tracebacks that the driver gets.
      host: the address of this machine at which the driver is to ``dial``.
      secret: what the driver knows, and nobody else.
    """

    def __init__(self, name: str, host: str, secret: bytes):
        self._name = name
        self._listener = listen(host)
        self.address: Address = self._listener.getsockname()
        self._requests: queue.SimpleQueue[Frame | Exception] = queue.SimpleQueue()
        self._connection: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        threading.Thread(target=self._receive, args=(secret,), name="requests", daemon=True).start()

    def _receive(self, secret: bytes) -> None:
        """In a thread of its own, so that large requests arrive while the group computes."""
        with self._listener:
            connection = Connection(accept(self._listener, secret))
        self._connection.put(connection)
        try:
            while True:
                self._requests.put(connection.read())
        except Exception as error:  # whatever it is, the rest of the request is still to come
            self._requests.put(error)

    def serve(self, answer: Callable[[str, tuple], Any]) -> None:
        """Answers requests, each a method and its arguments, until the driver's end is closed.

        The reply is what ``answer`` returned, or a ``RayTaskError`` with what it raised.

        Raises: what has kept a request from being taken in, such as ``MemoryError``.
        """
        connection = self._connection.get()
        try:
            while isinstance(request := self._requests.get(), Frame):
                connection.write(self._reply(request, answer))
                del request  # who waits must not keep the last request's arrays
            raise request
        except (EOFError, ConnectionError):  # the driver's end is closed
            pass
        finally:
            connection.end()
            connection.close()

    def _reply(self, request: Frame, answer: Callable[[str, tuple], Any]) -> Frame:
        try:
            method, arguments = request.open()
            return frame(request.number, answer(method, arguments))
        except Exception as error:
            return self._failure(request.number, error)

    def _failure(self, number: int, error: Exception) -> Frame:
        where, said = f"{self._name}: serve", traceback.format_exc()
        try:
            return frame(number, ray.exceptions.RayTaskError(where, said, error, where))
        except Exception:  # the error cannot be pickled, which Ray does not always notice
            cause = RuntimeError(f"{type(error).__name__}: {error}")
            return frame(number, ray.exceptions.RayTaskError(where, said, cause, where))
