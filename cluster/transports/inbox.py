"""The messages that arrive for one process, by whichever transport, and its wait for them."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from cluster.protocol.digests import CorruptedError
from mpmd.errors import StepAborted
from mpmd.runtime.inbox import Inbox

ABORT_REASON_SECONDS = 5.0
"""The seconds that a group without a peer waits for the driver, which knows the reason, to abort the step."""

_MAX_POLL_SECONDS = 0.02
"""The longest interval between two polls of a condition that no event reports."""

HEADER_BYTES = 56
"""The bytes of a header. It begins with the number of its source, whose listener reads the rest."""

_MAX_HEADERS = 64
_SOURCE = struct.Struct("<i")
_WAKE = _SOURCE.pack(-1).ljust(HEADER_BYTES, b"\0")

HeaderListener = Callable[[bytes], None]


class PeerLostError(RuntimeError):
    """This process has lost a connection. ``process`` is the number of the process that has to go."""

    def __init__(self, reason: str, process: int):
        super().__init__(reason, process)
        self.process = process

    def __str__(self) -> str:
        return self.args[0]


class _LostPeer(NamedTuple):
    since: float
    reason: str
    culprit: int


class ProcessInbox(Inbox):
    """The messages that have arrived for one process, by whichever transport.

    The thread that takes them blocks in reading a pipe. Processes of this node write headers to the pipe, and
    the thread passes them to listeners. Only this thread may call ``wait``.

    Args:
      name_of: what messages to users call the process with a number.
      group_of: the group of the process with a number.

    Attributes:
      is_closed: whether ``close`` was called.
    """

    def __init__(
        self,
        name_of: Callable[[int], str] = "group {}".format,
        group_of: Callable[[int], int] = int,
    ) -> None:
        super().__init__()
        self.name_of = name_of
        self._group_of = group_of
        self.is_closed = False
        self._groups: Collection[int] | None = None  # which take part in the step; None: all
        self._disconnected: dict[int, _LostPeer] = {}
        self.lost: PeerLostError | None = None
        """The loss that has ended a wait of this step, when the driver did not say in time why it came."""
        self._listeners: dict[int, HeaderListener] = {}
        self._closing = threading.Lock()
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.write_fd, False)
        self._poll = select.poll()
        self._poll.register(self._read_fd, select.POLLIN)

    def add_listener(self, process: int, listener: HeaderListener) -> None:
        """Has the waiting thread call ``listener`` with each header that a process writes to ``write_fd``.

        A header whose source has no listener goes to some listener, which notices that the header was
        changed.
        """
        self._listeners[process] = listener

    def begin_step(self, step: int, groups: Collection[int] | None = None) -> None:
        """Begins a step, as ``Inbox.begin_step``.

        Args:
          groups: the groups whose loss ends a wait of this step; by default, all.
        """
        self._groups, self.lost = groups, None
        super().begin_step(step)

    def wake(self) -> None:
        """Has the waiting thread check again, after another thread has changed something."""
        with (
            self._closing,
            contextlib.suppress(BlockingIOError),
        ):  # full: the thread does not sleep
            if not self.is_closed:
                os.write(self.write_fd, _WAKE)

    def wait(self, step: int, ready: Callable[[], bool], poll_seconds: float | None = None) -> None:
        """Waits until ``ready()``, which is called after each event.

        If no event reports the condition, ``ready`` is also called after ``poll_seconds``, after twice that
        time, and so on, with at most ``_MAX_POLL_SECONDS`` between two calls.

        Raises: ``StepAborted`` when the step is aborted, or a peer was lost and the driver does not say why.
        """
        while not ready():
            self._wait_for_event(step, poll_seconds)
            if poll_seconds is not None:
                poll_seconds = min(2 * poll_seconds, _MAX_POLL_SECONDS)

    def _wait_for_event(self, step: int, seconds: float | None = None) -> None:
        """Waits for headers for ``seconds`` at most, and passes them to their listeners."""
        if step in self._aborted:
            raise StepAborted(self._aborted[step])
        # Headers of a lost peer are still read.
        lost = self._lost_peer() if self._disconnected else None
        if lost is not None and not self._poll.poll(0):
            remaining = self._seconds_for_reason(lost)
            seconds = remaining if seconds is None else min(seconds, remaining)
        if seconds is not None and not self._poll.poll(seconds * 1000):
            return
        headers = os.read(self._read_fd, _MAX_HEADERS * HEADER_BYTES)
        read = time.perf_counter_ns()
        for start in range(0, len(headers), HEADER_BYTES):
            header = headers[start : start + HEADER_BYTES]
            if header != _WAKE and self._listeners:
                (source,) = _SOURCE.unpack_from(header)
                self._listeners.get(source, next(iter(self._listeners.values())))(header)
        if len(headers) < _MAX_HEADERS * HEADER_BYTES:  # all that there was
            self._unread_since = read

    def _lost_peer(self) -> int | None:
        """The first lost process among the processes that take part in the step; ``None`` if none was lost.

        Any lost process may hold up the awaited message, because its sender may wait for the lost process.
        """
        groups = self._groups
        for process in list(self._disconnected):  # other threads add to it
            if groups is None or self._group_of(process) in groups:
                return process
        return None

    def _seconds_for_reason(self, process: int) -> float:
        """Seconds for which the driver may still say why a peer was lost; raises when there are none."""
        loss = self._disconnected[process]
        remaining = loss.since + ABORT_REASON_SECONDS - time.monotonic()
        if remaining <= 0:
            self.lost = self.lost or PeerLostError(loss.reason, loss.culprit)
            raise StepAborted(f"{self.name_of(process)} is gone: {loss.reason}")
        return remaining

    def mark_disconnected(self, process: int, reason: str = "its process has closed its connections") -> None:
        self._disconnected.setdefault(process, _LostPeer(time.monotonic(), reason, process))
        self.wake()

    def mark_unreadable(self, process: int, here: int, error: Exception) -> None:
        """Records that this process, ``here``, cannot take what a peer sends.

        The driver does not know, so no wait is for a reason of its. If nothing was changed on the way, it is
        not the peer that has to go, but this process.
        """
        me, culprit = self.name_of(here), here
        reason = f"{me} cannot take a message of {self.name_of(process)}: {type(error).__name__}: {error}"
        if isinstance(error, CorruptedError):
            reason, culprit = f"what it sends to {me} does not arrive as it was sent: {error}", process
        since = time.monotonic() - ABORT_REASON_SECONDS
        self._disconnected.setdefault(process, _LostPeer(since, reason, culprit))
        self.wake()

    def close(self) -> None:
        """Closes the pipe, and lets go of the messages. No thread may wait any more."""
        with self._closing:
            self.is_closed = True
            os.close(self._read_fd)
            os.close(self.write_fd)
        # They refer to this object, and to the memory of peers.
        self._listeners.clear()
        self._arrived.clear()
