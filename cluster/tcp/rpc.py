"""Calls of the driver on a group over a TCP connection: requests one way, replies the other way, in order.

Actor calls of Ray would do the same, and do so with ``transport="object_store"``, but each call takes as much
processor time as several small tasks, in the driver and again in the actor.

Requests and replies are frames (``cluster.tcp.frames``), by whose numbers a reply finds its request.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

import ray

from cluster.tcp.connection import Connection
from cluster.tcp.frames import Frame, encode, read_frame
from cluster.tcp.writer import Writer


class Client:
    """The driver's end: sends requests, and receives replies in a thread of its own, so no caller waits.

    Args:
      connection: the connection with a group's ``Server``.
      on_reply: is called with each reply, in the order of the requests.
      on_disconnect: is called with the reason when the connection ends, once or more.

    Attributes:
      thread: calls ``on_reply``.
    """

    def __init__(
        self,
        connection: Connection,
        on_reply: Callable[[Frame], None],
        on_disconnect: Callable[[BaseException], None],
    ):
        self._connection = connection
        self._writer = Writer(connection, "mpmd requests")
        self._on_reply = on_reply
        self._on_disconnect = on_disconnect
        self.thread = threading.Thread(target=self._read_replies, name="mpmd replies", daemon=True)
        self._writer.start()
        self.thread.start()

    def send(self, request: Frame) -> None:
        """Sends a request, now or later. Requests are sent in the order of the calls to ``send``."""
        self._writer.put(request.pieces)

    def _read_replies(self) -> None:
        try:
            while True:
                self._on_reply(read_frame(self._connection))
        except Exception as error:  # after any of them, the rest of the reply is still to come
            for reason in filter(None, (self._writer.error, error)):
                self._on_disconnect(reason)
            self._connection.end()

    def end(self) -> None:
        """Ends the connection; does not wait, and may be called by the garbage collector, at any point."""
        self._connection.end()

    def close(self) -> None:
        self._connection.end()
        self._writer.close()
        self.thread.join()
        self._connection.close()


class Server:
    """Receives the requests of one driver, and answers them in order; ``name`` appears in tracebacks."""

    def __init__(self, name: str, connection: Connection):
        self._name = name
        self._connection = connection
        self._requests: queue.SimpleQueue[Frame | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._read_requests, name="requests", daemon=True).start()

    def _read_requests(self) -> None:
        """Runs in a thread of its own, so that large requests arrive while the group computes."""
        try:
            while True:
                self._requests.put(read_frame(self._connection))
        except Exception as error:  # after any of them, the rest of the request is still to come
            self._requests.put(error)

    def serve(self, answer: Callable[[Any], Any]) -> None:
        """Answers requests until the driver's end is closed.

        The reply is the result of ``answer``, or a ``RayTaskError`` with the error that it raises.

        Raises: the error that kept a request from being received, such as ``MemoryError``.
        """
        connection = self._connection
        try:
            while isinstance(request := self._requests.get(), Frame):
                number, asked = request.number, _decoded(request)
                del request  # who answers may let go of the arrays before the answer is there
                connection.write(self._reply(number, asked, answer).pieces)
                del asked  # an idle thread must not keep the last request's arrays
            raise request
        except (EOFError, ConnectionError):  # the driver's end is closed
            pass
        finally:
            connection.end()
            connection.close()

    def _reply(self, number: int, asked: Any, answer: Callable[[Any], Any]) -> Frame:
        try:
            if isinstance(asked, Exception):
                raise asked
            return encode(number, answer(asked))
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
    try:
        return request.decode()
    except Exception as error:
        return error
