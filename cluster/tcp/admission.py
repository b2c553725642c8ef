"""Sockets that listen, and let in peers with the credentials and nobody else.

All who connect are greeted first (``cluster.tcp.greeting``), so that nothing of a stranger is interpreted.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, Self, TypeVar

from cluster.tcp.credentials import Credentials
from cluster.tcp.greeting import CHALLENGE_BYTES, Greeting, Wait

_MAX_GREETINGS = 256
"""The most greetings under way; beyond that the oldest is given up that has proven nothing."""

OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The errors for which no connection can be accepted now; one that has come stays in the system's queue."""

_SHORTAGE_SECONDS = 0.05
"""The pause, in a shortage, before the next try to accept. Greetings that were silent longer are given up."""

_LASTING_SECONDS = 10.0
"""The seconds of a shortage after which a process can accept nobody, and so has to say so."""


class Link(Protocol):
    """One end of a connection."""

    def close(self) -> None: ...


LinkT = TypeVar("LinkT", bound=Link)


class Admission(abc.ABC, Generic[LinkT]):
    """Accepts connections from peers with the credentials only.

    Greets all peers that connect at the same time. So a stranger that stays silent keeps nobody waiting.

    Args:
      listening: the socket, which ``close`` closes.
    """

    def __init__(self, listening: socket.socket):
        self._socket = listening
        self._socket.setblocking(False)
        self.identity = secrets.token_bytes(CHALLENGE_BYTES)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._resumes = 0.0
        self._short_since: float | None = None
        self._greetings: list[Greeting] = []  # the oldest first
        self._is_interrupted = False

    @abc.abstractmethod
    def _admitted(self, greeting: Greeting) -> LinkT:
        """The connection of a peer whose greeting is done. Raises ``OSError`` when the peer is gone."""

    def accept(self, credentials: Credentials) -> tuple[int, LinkT]:
        """Waits for a peer that has the credentials. One thread at a time may call this.

        Returns: the number that the peer has given itself, and the connection.
        Raises: ``ConnectionError`` after ``interrupt``, or when this process lacks descriptors for long.
        """
        while True:
            self.check()
            for key, _ in self._selector.select(self._seconds_left()):
                if key.data is None:
                    self._greet()
                elif self._is_welcome(key.data, credentials):
                    try:
                        return key.data.number, self._admitted(key.data)
                    except OSError:  # who has proven what it is, is gone
                        key.data.link.close()
            now = time.monotonic()
            if not self._is_accepting() and now >= self._resumes:
                self._selector.register(self._socket, selectors.EVENT_READ)
            for greeting in [greeting for greeting in self._greetings if greeting.deadline <= now]:
                self._refuse(greeting)

    def _seconds_left(self) -> float | None:
        times = [greeting.deadline for greeting in self._greetings[:1]]
        if not self._is_accepting():
            times.append(self._resumes)
        return max(min(times) - time.monotonic(), 0) if times else None

    def _is_accepting(self) -> bool:
        return self._socket in self._selector.get_map()

    def _greet(self) -> None:
        try:
            with self._socket.dup():  # which stays free: a handshake of TLS opens a file
                link, _ = self._socket.accept()
        except OSError as error:
            if error.errno in OUT_OF_RESOURCES:
                self._economize(error)
            return  # or who has connected is gone already
        self._short_since = None
        with contextlib.suppress(OSError):  # it is gone
            if len(self._greetings) >= _MAX_GREETINGS:
                self._refuse(next(self._strangers(), self._greetings[0]))
            greeting = Greeting(link, self.identity)
            link.setblocking(False)
            self._selector.register(link, selectors.EVENT_READ, greeting)
            self._greetings.append(greeting)
            link.send(greeting.challenge)

    def _strangers(self) -> Iterator[Greeting]:
        """The greetings of peers that have proven nothing yet, the oldest first."""
        return (greeting for greeting in self._greetings if greeting.handshake is None)

    def _economize(self, error: OSError) -> None:
        """Accepts nobody for a while, rather than to fail again and again, and gives up who stays silent.

        Raises: ``ConnectionError`` when the shortage lasts.
        """
        now = time.monotonic()
        self._short_since = self._short_since or now
        if now - self._short_since >= _LASTING_SECONDS:
            raise ConnectionError(error.errno, f"{error.strerror}, for {_LASTING_SECONDS:g} s")
        self._resumes = now + _SHORTAGE_SECONDS
        self._selector.unregister(self._socket)
        silent = [greeting for greeting in self._strangers() if greeting.begun <= now - _SHORTAGE_SECONDS]
        for greeting in silent:
            self._refuse(greeting)

    def _is_welcome(self, greeting: Greeting, credentials: Credentials) -> bool:
        """Whether the greeting has come to its good end; strangers are refused."""
        if greeting.link.fileno() < 0:
            return False  # given up in the same round
        try:
            if not greeting.proceed(credentials):
                return False
        except OSError:
            self._refuse(greeting)
            return False
        self._forget(greeting)
        return True

    def _forget(self, greeting: Greeting) -> None:
        self._greetings.remove(greeting)
        self._selector.unregister(greeting.link)

    def _refuse(self, greeting: Greeting) -> None:
        self._forget(greeting)
        greeting.link.close()

    def check(self) -> None:
        """Raises ``ConnectionError`` after ``interrupt``. May be called from any thread."""
        if self._is_interrupted:
            raise ConnectionError("nobody is waited for any more")

    def interrupt(self) -> None:
        """Ends ``accept``, now and later. May be called from any thread, also after ``close``."""
        self._is_interrupted = True
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes who waits

    def close(self) -> None:
        """Stops listening, and closes the connections of all that were not accepted. May be called again."""
        for greeting in list(self._greetings):
            self._refuse(greeting)
        self._selector.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def connecting(link: socket.socket, where: str, timeout: float, check: Callable[[], None]) -> Iterator[Wait]:
    """The limits of waiting while ``link`` is connected, which is closed if that fails.

    Raises: ``ConnectionError`` for every ``OSError``.
    """
    try:
        link.setblocking(False)
        yield Wait(time.monotonic() + timeout, check)
    except BaseException as error:
        link.close()
        if not isinstance(error, OSError):
            raise
        reason = "no answer" if isinstance(error, TimeoutError) else error
        raise ConnectionError(f"no connection to {where}: {reason}") from error
