"""Calls of the driver on a group over a TCP connection: requests one way, replies the other way, in order.

Actor calls of Ray would do the same, and do so with ``transport="object_store"``, but each of them takes as
much processor time as several small tasks, in the driver and again in the actor.

A message is a frame: a number, a pickle, and the large buffers that the pickle refers to, which are written
and read without a copy. Both ends authenticate with a shared secret; the frames are not encrypted.
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

from cluster.sockets import Address, Listener

_LARGE_BYTES = 64 * 1024
"""Buffers above this size are not copied into the pickle."""

_MAX_IO_BYTES = 2**30
"""The most that is written or read by one system call; some systems refuse more than 2 GiB."""

_HEAD = struct.Struct("<QQI")  # the number, the bytes of the pickle, the number of buffers
_SIZE = struct.Struct("<Q")

Buffer = bytes | memoryview


class Frame(NamedTuple):
    """An encoded message: a pickle, and the large buffers beside it."""

    number: int
    content: Buffer
    buffers: tuple[memoryview, ...]

    def decode(self) -> Any:
        """The message. Raises what unpickling raises."""
        return pickle.loads(self.content, buffers=self.buffers)


def encode(number: int, message: object, dumps: Callable[..., bytes] = pickle.dumps) -> Frame:
    """Makes a frame of a message; its buffers are views of the message's. Raises what pickling raises.

    Args:
      number: by which a reply finds its request.
      message: of classes that can be imported, where ``dumps`` is Python's own pickle.
      dumps: another pickle, which takes longer and takes more.
    """
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes > _LARGE_BYTES:
            large.append(view)
            return False
        return True

    content = dumps(message, protocol=5, buffer_callback=is_small)
    return Frame(number, content, tuple(large))


class FrameConnection:
    """One end of a TCP connection. One thread may write while another one reads.

    Args:
      tcp: the socket, which ``close`` closes.
    """

    def __init__(self, tcp: socket.socket):
        self._socket = tcp

    def write(self, message: Frame) -> None:
        """Returns when the network has taken the frame. After an ``OSError`` the connection must end."""
        number, content, buffers = message
        head = _HEAD.pack(number, len(content), len(buffers))
        sizes = [_SIZE.pack(view.nbytes) for view in buffers]
        for view in (memoryview(b"".join([head, *sizes, content])), *buffers):
            for start in range(0, view.nbytes, _MAX_IO_BYTES):
                self._socket.sendall(view[start : start + _MAX_IO_BYTES])

    def read(self) -> Frame:
        """Waits for a frame, whose buffers belong to the caller.

        Raises: ``EOFError`` or ``OSError`` when the connection has ended.
        """
        number, num_bytes, num_buffers = _HEAD.unpack(self._read_bytes(_HEAD.size))
        sizes = [size for (size,) in _SIZE.iter_unpack(self._read_bytes(num_buffers * _SIZE.size))]
        content = self._read_bytes(num_bytes)
        return Frame(number, content, tuple([self._read_bytes(size) for size in sizes]))

    def _read_bytes(self, num_bytes: int) -> memoryview:
        buffer = np.empty(num_bytes, np.uint8).data
        rest = buffer
        while rest:
            received = self._socket.recv_into(rest[:_MAX_IO_BYTES])
            if not received:
                raise EOFError("the other end has closed the connection")
            rest = rest[received:]
        return buffer

    def end(self) -> None:
        """Ends the connection, and all reading and writing, at both ends. ``close`` is still to be called."""
        with contextlib.suppress(OSError):  # the connection has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class Client:
    """The driver's end: sends requests and receives replies in threads of its own, so no caller waits.

    Args:
      connection: the connection with a group's ``Server``.
      on_reply: is called with each reply, in the order of the requests.
      on_disconnect: is called with the reason when the connection ends, once or more.
    """

    def __init__(
        self,
        connection: FrameConnection,
        on_reply: Callable[[Frame], None],
        on_disconnect: Callable[[BaseException], None],
    ):
        self._connection = connection
        self._on_reply = on_reply
        self._on_disconnect = on_disconnect
        self._requests: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"mpmd {name}", daemon=True)
            for work, name in ((self._write_requests, "requests"), (self._read_replies, "replies"))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, request: Frame) -> None:
        """Queues a request. Requests are sent in the order of these calls."""
        self._requests.put(request)

    def _write_requests(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._connection.write(request)
            except Exception as error:  # after any of them, a part of the request may have been sent
                self._on_disconnect(error)
                self._connection.end()
            del request  # an idle thread must not keep the last request's arrays

    def _read_replies(self) -> None:
        try:
            while True:
                self._on_reply(self._connection.read())
        except Exception as error:  # after any of them, the rest of the reply is still to come
            self._on_disconnect(error)
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
    """A group's end: receives the requests of one driver, and answers them in order.

    Args:
      name: the group's, for the tracebacks that the driver gets.
      host: the address of this machine to which the driver connects.
      secret: what the driver uses to authenticate.
    """

    def __init__(self, name: str, host: str, secret: bytes):
        self._name = name
        self._listener = Listener(host)
        self.address: Address = self._listener.address
        self._requests: queue.SimpleQueue[Frame | Exception] = queue.SimpleQueue()
        self._connection: queue.SimpleQueue[FrameConnection] = queue.SimpleQueue()
        threading.Thread(target=self._read_requests, args=(secret,), name="requests", daemon=True).start()

    def _read_requests(self, secret: bytes) -> None:
        """Runs in a thread of its own, so that large requests arrive while the group computes."""
        with self._listener:
            connection = FrameConnection(self._listener.accept(secret))
        self._connection.put(connection)
        try:
            while True:
                self._requests.put(connection.read())
        except Exception as error:  # after any of them, the rest of the request is still to come
            self._requests.put(error)

    def serve(self, answer: Callable[[str, tuple], Any]) -> None:
        """Answers requests, each a method and its arguments, until the driver's end is closed.

        The reply is what ``answer`` returns, or a ``RayTaskError`` with what it raises.

        Raises: the error that kept a request from being received, such as ``MemoryError``.
        """
        connection = self._connection.get()
        try:
            while isinstance(request := self._requests.get(), Frame):
                number, call = request.number, _decoded(request)
                del request  # the arrays belong to the call, which may let go of them before it ends
                connection.write(self._reply(number, call, answer))
                del call  # an idle thread must not keep the last call's arrays
            raise request
        except (EOFError, ConnectionError):  # the driver's end is closed
            pass
        finally:
            connection.end()
            connection.close()

    def _reply(self, number: int, call: Any, answer: Callable[[str, tuple], Any]) -> Frame:
        try:
            if isinstance(call, Exception):
                raise call
            method, arguments = call
            return encode(number, answer(method, arguments))
        except Exception as error:
            return self._failure(number, error)

    def _failure(self, number: int, error: Exception) -> Frame:
        """The error as Ray reports it, with Ray's pickle: its class may be one that cannot be imported."""
        dumps = ray.cloudpickle.dumps
        where, trace = f"{self._name}: serve", traceback.format_exc()
        try:
            return encode(number, ray.exceptions.RayTaskError(where, trace, error, where), dumps)
        except Exception:  # the error does not pickle, which Ray does not always notice
            cause = RuntimeError(f"{type(error).__name__}: {error}")
            return encode(number, ray.exceptions.RayTaskError(where, trace, cause, where), dumps)


def _decoded(request: Frame) -> Any:
    """What was encoded, or the exception that decoding raises."""
    try:
        return request.decode()
    except Exception as error:
        return error
