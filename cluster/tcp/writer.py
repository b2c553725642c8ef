"""Writes to a connection, in the order of the calls, without keeping the callers waiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from itertools import chain

from cluster.tcp.connection import Connection

_INLINE_BYTES = 2 * 2**20
"""Up to this size, the caller itself writes what the network takes at once. To write more takes time, in
which the caller can compute."""


class Writer:
    """The writing half of a connection, with a thread for what the network does not take at once.

    Args:
      connection: stays the caller's.
      name: the thread's.
    """

    def __init__(self, connection: Connection, name: str):
        self._connection = connection
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_idle = True  # nothing is in the queue or in the thread's hands
        self._queue: queue.SimpleQueue[Iterator[list[memoryview]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.error: Exception | None = None
        """The error by which writing has shown that the connection has ended, if it has."""

    def start(self) -> None:
        self._thread.start()

    def put(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Writes all pieces, now or later. They must not change until then. Never waits for the network.

        When the connection has ended, nothing happens: who reads from it notices.
        """
        views = [memoryview(piece) for piece in pieces]
        with self._lock:
            if self._is_closed or self.error is not None:
                return
            try:
                rest = self._connection.encoded(views)
                if self._is_idle and sum(view.nbytes for view in views) <= _INLINE_BYTES:
                    for record in rest:
                        self._connection.write_some(record, wait=False)
                        if record:
                            rest = chain([record], rest)
                            break
                    else:
                        return
            except Exception as error:
                self._fail(error)
                return
            self._is_idle = False
            self._queue.put(rest)

    def _run(self) -> None:
        while (records := self._queue.get()) is not None:
            self._write(records)
            del records  # an idle thread must not keep the last message's arrays
            with self._lock:
                self._is_idle = self._queue.empty()

    def _write(self, records: Iterator[list[memoryview]]) -> None:
        try:
            for record in records:
                while record and self.error is None:
                    self._connection.write_some(record, wait=True)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends the connection, whatever the error is: a part of the pieces may have been written."""
        self.error = error
        self._connection.end()  # so that the end that reads notices, too

    def close(self) -> None:
        """Ends the thread, after the connection has ended."""
        with self._lock:
            self._is_closed = True
            self._queue.put(None)
        self._thread.join()
