"""Sockets that listen, and accept peers that have the credentials of the launch, and nobody else."""

from __future__ import annotations

import abc
import contextlib
import errno
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, Self, TypeVar

from cluster.tcp import handshake
from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials
from cluster.tcp.handshake import AuthenticatedPeer, SocketWait, authenticate

_MAX_HANDSHAKES = 256
"""The most handshakes at the same time; further connections wait in the system's queue."""

OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_PAUSE_SECONDS = 0.05
"""The pause after a failure to accept, such as a lack of descriptors, which a handshake may free."""

_LASTING_SECONDS = 10.0
"""The seconds after which ``accept`` fails, if no connection could be opened meanwhile."""


LinkT = TypeVar("LinkT", Connection, socket.socket)


class Listener(abc.ABC, Generic[LinkT]):
    """Accepts connections from peers that have the credentials.

    A thread accepts every connection, and a thread of each connection carries out its handshake, which ends
    after a few seconds. So silent peers delay another peer only if there are ``_MAX_HANDSHAKES`` silent ones.

    Args:
      listening: the socket, which ``close`` closes.
      credentials: of both ends.
    """

    def __init__(self, listening: socket.socket, credentials: Credentials):
        self._socket = listening
        self.credentials = credentials
        self.identity = secrets.token_hex(16)
        self._context = credentials.context(accepts=True)
        self._context.sni_callback = self._refuse_other_names
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._accepted: queue.SimpleQueue[tuple[int, LinkT] | ConnectionError | None] = queue.SimpleQueue()
        self._is_interrupted = False
        threading.Thread(target=self._listen, name="listener", daemon=True).start()

    @abc.abstractmethod
    def _open(self, link: socket.socket, peer: AuthenticatedPeer) -> LinkT:
        """The connection with a peer. Raises ``OSError`` when the peer is gone."""

    def accept(self) -> tuple[int, LinkT]:
        """Waits for a peer. One thread at a time may call this.

        Returns: the number that the peer says it has, and the connection.
        Raises: ``ConnectionError`` after ``interrupt``, or when this process lacks descriptors for long.
        """
        while True:
            self.check()
            accepted = self._accepted.get()
            if isinstance(accepted, ConnectionError):
                raise accepted
            if accepted is not None:
                return accepted

    def _refuse_other_names(self, tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        return None if name == self.identity else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    def _listen(self) -> None:
        failing_since: float | None = None
        while True:
            self._handshakes.acquire()
            try:
                link, _ = self._socket.accept()
                self._start_handshake(link)
                failing_since = None
            except OSError as error:
                self._handshakes.release()
                if self._is_interrupted:
                    return
                now = time.monotonic()
                failing_since = failing_since or now
                if now - failing_since >= _LASTING_SECONDS:
                    self._accepted.put(
                        ConnectionError(error.errno, f"{error.strerror}, for {_LASTING_SECONDS:g} s")
                    )
                    self._socket.close()  # refuses those who wait, of whom the driver would wait for minutes
                    return
                time.sleep(_PAUSE_SECONDS)

    def _start_handshake(self, link: socket.socket) -> None:
        thread = threading.Thread(target=self._authenticate, args=(link,), name="handshake", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system refuses another thread
            link.close()
            raise OSError(errno.ENOMEM, str(error)) from error

    def _authenticate(self, link: socket.socket) -> None:
        try:
            link.setblocking(False)
            wait = SocketWait(time.monotonic() + handshake.HANDSHAKE_SECONDS, self.check)
            peer = authenticate(link, self._context, wait)
            self._accepted.put((peer.number, self._open(link, peer)))
        except OSError:  # the other end does not have the credentials, or is gone
            link.close()
        finally:
            self._handshakes.release()
        if self._is_interrupted:
            self._close_accepted()

    def check(self) -> None:
        """Raises ``ConnectionError`` after ``interrupt``. May be called from any thread."""
        if self._is_interrupted:
            raise ConnectionError("nobody is waited for any more")

    def interrupt(self) -> None:
        """Ends ``accept``, now and later. May be called from any thread, also after ``close``."""
        self._is_interrupted = True
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts
        self._close_accepted()

    def _close_accepted(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(accepted := self._accepted.get_nowait(), tuple):
                    accepted[1].close()
        self._accepted.put(None)  # wakes ``accept``

    def close(self) -> None:
        """Stops listening, and closes the connections that ``accept`` has not returned. May be repeated."""
        self.interrupt()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def connecting(
    link: socket.socket, where: str, timeout: float, check: Callable[[], None]
) -> Iterator[SocketWait]:
    """The limits of waiting while ``link`` is connected, which is closed if that fails.

    Raises: ``ConnectionError`` for every ``OSError``.
    """
    try:
        link.setblocking(False)
        yield SocketWait(time.monotonic() + timeout, check)
    except BaseException as error:
        link.close()
        if not isinstance(error, OSError):
            raise
        reason = str(error)  # the error itself has this frame
        if isinstance(error, ssl.SSLError):
            reason = f"another listener answers, or one with other credentials ({error})"
        elif isinstance(error, TimeoutError):
            reason = "no answer"
        raise ConnectionError(f"no connection to {where}: {reason}") from error
