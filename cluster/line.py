"""The line from the driver to a group: requests go one way and replies the other, in order, over TCP.

Calls of Ray would do, and do where nothing but Ray leads to a group. But each takes as much processor time as
several small tasks, in the driver and again in the actor.

A message is a pickle, and after it the large buffers that it refers to: an array is copied into the network
and out of it, and nowhere else.
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
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any, NamedTuple

import numpy as np
import ray

from cluster.sockets import socket_of

_LARGE_BYTES = 64 * 1024
"""Buffers above this size are not copied into the pickle."""

_STOPPED_SECONDS = 60
"""A group that stops for so long in the middle of a reply is stuck."""

_COUNTS = struct.Struct("<QI")  # bytes of the pickle, and how many buffers follow it
_SIZE = struct.Struct("<Q")

Address = tuple[str, int]


class Frame(NamedTuple):
    """A message as it is written: a pickle, and the buffers beside it, still those of their owners."""

    content: bytes
    buffers: tuple[memoryview, ...]


def frame(message: object) -> Frame:
    """Readies a message to be written. Raises what pickling it raises."""
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes > _LARGE_BYTES:
            large.append(view)
            return False
        return True

    content = ray.cloudpickle.dumps(message, protocol=5, buffer_callback=is_small)
    return Frame(content, tuple(large))


class Line:
    """One end. One thread may write while another one reads."""

    def __init__(self, connection: socket.socket):
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def write(self, message: Frame) -> None:
        """Returns when the network has taken the message. Raises ``OSError`` when the line has ended."""
        content, buffers = message
        sizes = [_SIZE.pack(view.nbytes) for view in buffers]
        self._socket.sendall(b"".join([_COUNTS.pack(len(content), len(buffers)), *sizes, content]))
        for view in buffers:
            self._socket.sendall(view)

    def read(self) -> Any:
        """Waits for a message; its arrays are the reader's own.

        Raises: ``EOFError`` or ``OSError`` when the line has ended.
        """
        num_bytes, num_buffers = _COUNTS.unpack(self._filled(_COUNTS.size))
        sizes = [size for (size,) in _SIZE.iter_unpack(self._filled(num_buffers * _SIZE.size))]
        content = self._filled(num_bytes)
        return pickle.loads(content, buffers=[self._filled(size) for size in sizes])

    def _filled(self, num_bytes: int) -> memoryview:
        buffer = np.empty(num_bytes, np.uint8).data
        left = buffer
        while left:
            received = self._socket.recv_into(left)
            if not received:
                raise EOFError("the other end has closed the line")
            left = left[received:]
        return buffer

    def end(self) -> None:
        """Ends the line at both ends, whoever is reading or writing; ``close`` is still to be called."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def dial(address: Address, secret: bytes) -> Line:
    """The driver's end, on which a message that stops midway for long ends the line.

    Raises: ``OSError`` when nobody is there, ``AuthenticationError`` when a stranger is.
    """
    with Client(address, authkey=secret) as connection:
        tcp = socket_of(connection)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STOPPED_SECONDS, 0))
    return Line(tcp)


class Desk:
    """A group's end: takes the requests of one driver, as they come, and answers them in order.

    Args:
      host: the address of this machine at which the driver is to ``dial``.
      secret: what the driver knows, and nobody else.
    """

    def __init__(self, host: str, secret: bytes):
        self._listener = Listener((host, 0), authkey=secret)
        self.address: Address = self._listener.address
        self._requests: queue.SimpleQueue[tuple[int, str, tuple] | None] = queue.SimpleQueue()
        self._connected: queue.SimpleQueue[Line] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="requests", daemon=True).start()

    def _receive(self) -> None:
        """In a thread of its own, so that large requests arrive while the group computes."""
        line = self._accept()
        self._connected.put(line)
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._requests.put(line.read())
        self._requests.put(None)

    def _accept(self) -> Line:
        with self._listener:
            while True:
                strangers = contextlib.suppress(AuthenticationError, EOFError, ConnectionError)
                with strangers, self._listener.accept() as connection:
                    return Line(socket_of(connection))

    def serve(self, answer: Callable[[str, tuple], Any]) -> None:
        """Answers requests, each a number, a method and its arguments, until the driver's end is closed.

        The reply is the number and what ``answer`` returned, or a ``RayTaskError`` with what it raised.
        """
        with contextlib.closing(self._connected.get()) as line:
            while (request := self._requests.get()) is not None:
                number, method, arguments = request
                try:
                    reply = frame((number, answer(method, arguments)))
                except Exception as error:
                    raised = ray.exceptions.RayTaskError(method, traceback.format_exc(), error)
                    reply = frame((number, raised))
                with contextlib.suppress(OSError):  # the driver's end is closed, as the queue will say
                    line.write(reply)
                del request, arguments, reply  # who waits must not keep the last request's arrays
