"""Writes to a connection, in the order of the calls, without keeping the callers waiting."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Sequence

from cluster.transports.network.frames import Piece

_INLINE_BYTES = 2 * 2**20
"""Up to this size, the caller itself writes what the network takes at once. To write more takes time, in
which the caller can compute."""

_MAX_PIECES = min(os.sysconf("SC_IOV_MAX"), 1024)
"""The most that one system call writes."""


class Writer:
    """The writing half of a connection, with a thread for what the network does not take at once.

    Args:
      tcp: the connection, which stays the caller's.
      name: the thread's.
    """

    def __init__(self, tcp: socket.socket, name: str):
        self._tcp = tcp
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_idle = True  # nothing is in the queue or in the thread's hands
        self._queue: queue.SimpleQueue[list[memoryview] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.error: OSError | None = None
        """Why the connection has ended, if writing has shown it."""

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, pieces: Sequence[Piece]) -> None:
        """Writes all pieces, now or later. They must not change until then. Never waits for the network.

        When the connection has ended, nothing happens: who reads from it notices.
        """
        views = [memoryview(piece) for piece in pieces]
        with self._lock:
            if self._is_closed or self.error is not None:
                return
            if self._is_idle and sum(view.nbytes for view in views) <= _INLINE_BYTES:
                self._write(views, socket.MSG_DONTWAIT)
                if not views:
                    return
            self._is_idle = False
            self._queue.put(views)

    def _run(self) -> None:
        while (views := self._queue.get()) is not None:
            while views and self.error is None:
                self._write(views, 0)
            del views  # an idle thread must not keep the last message's arrays
            with self._lock:
                self._is_idle = self._queue.empty()

    def _write(self, views: list[memoryview], flags: int) -> None:
        """Writes from the front of the list, and removes what is written."""
        try:
            written = self._tcp.sendmsg(views[:_MAX_PIECES], [], flags)
        except BlockingIOError:
            return
        except OSError as error:
            self.error = error
            views.clear()
            with contextlib.suppress(OSError):
                self._tcp.shutdown(socket.SHUT_RDWR)  # so that the end that reads notices, too
            return
        count = 0
        while count < len(views) and written >= views[count].nbytes:
            written -= views[count].nbytes
            count += 1
        del views[:count]
        if written:
            views[0] = views[0][written:]

    def close(self) -> None:
        """Ends the thread, after the connection has ended."""
        with self._lock:
            self._is_closed = True
            self._queue.put(None)
        self._thread.join()
