"""The messages that arrive for one process, by whichever transport, and its wait for them."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax

from cluster.protocol.digests import CorruptedError
from mpmd.errors import StepAborted
from mpmd.runtime.transport import Array, MessageId

ABORT_REASON_SECONDS = 5.0
"""The seconds that a group without a peer waits for the driver, which knows the reason, to abort the step."""

_MAX_POLL_SECONDS = 0.02
"""The longest interval between two polls of a condition that no event reports."""

HEADER_BYTES = 48
"""The bytes of a header. It begins with the number of its source, whose listener reads the rest."""

_MAX_HEADERS = 64
_SOURCE = struct.Struct("<i")
_WAKE = _SOURCE.pack(-1).ljust(HEADER_BYTES, b"\0")

HeaderListener = Callable[[bytes], None]
"""Is called with a header."""


class PeerLostError(RuntimeError):
    """This process has lost a connection. ``process`` is the number of the process that has to go."""

    def __init__(self, reason: str, process: int):
        super().__init__(reason, process)
        self.process = process

    def __str__(self) -> str:
        return self.args[0]


class _Loss(NamedTuple):
    """The loss of a peer: when, why, and the process that has to go."""

    since: float
    reason: str
    culprit: int


class Arrival(Protocol):
    """A message that has arrived. Exactly one of the methods is called, once."""

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        """The values. Raises ``StepAborted`` when they were lost on the way."""
        ...

    def drop(self) -> None:
        """Discards the message, because its step was aborted. Called from any thread."""
        ...


class Inbox:
    """The messages that have arrived for one process and were not yet taken.

    One thread, which runs the group's programs, waits here. It blocks in reading a pipe, and so uses no
    processor time. Processes of this node write headers to the pipe, and the thread passes them to listeners;
    other threads of this process ``add`` messages and then ``wake`` it. Only that thread may call
    ``begin_step``, ``take`` and ``wait``; any thread may call the other methods.

    Args:
      name_of: what messages to users call the process with a number.

    Attributes:
      is_closed: whether ``close`` was called.
      arrived: when the message that was taken last had arrived, in nanoseconds of ``time.perf_counter_ns``.
    """

    def __init__(self, name_of: Callable[[int], str] = "group {}".format) -> None:
        self.name_of = name_of
        self.arrived = 0
        self._unread_since = time.perf_counter_ns()  # what is read next from the pipe was written later
        self._lock = threading.Lock()
        self.is_closed = False
        self._step = 0
        self._taking_part: frozenset[int] | None = None  # the processes; None: all
        self._arrived: dict[MessageId, tuple[int, Arrival]] = {}
        self._aborted: dict[int, str] = {}
        self._disconnected: dict[int, _Loss] = {}
        self.lost: PeerLostError | None = None
        """The loss that has ended a wait of this step, when the driver did not say in time why it came."""
        self._listeners: dict[int, HeaderListener] = {}
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

    def begin_step(self, step: int, taking_part: frozenset[int] | None = None) -> None:
        """Begins a step: earlier steps do not run any more, and their state is forgotten.

        The numbers of steps ascend. Messages of earlier steps, which can only have been aborted, are dropped,
        also messages that arrive later.

        Args:
          taking_part: the processes whose loss ends a wait of this step; by default, all.
        """
        with self._lock:
            self._step, self._taking_part, self.lost = step, taking_part, None
            self._aborted = {number: why for number, why in self._aborted.items() if number >= step}
            outdated = [self._arrived.pop(message) for message in list(self._arrived) if message.step < step]
        for _, arrival in outdated:
            arrival.drop()

    def add(self, message: MessageId, arrival: Arrival, written: int | None = None) -> None:
        """Adds a message that has arrived; drops it when its step is over or aborted.

        Args:
          written: nanoseconds of the sender's clock at which its header was written to the pipe; ``None``:
            now. Limited to the time between the last read of the pipe and now.
        """
        with self._lock:
            if message.step >= self._step and message.step not in self._aborted:
                now = time.perf_counter_ns()
                at = now if written is None else min(max(written, self._unread_since), now)
                self._arrived[message] = at, arrival
                return
        arrival.drop()

    def wake(self) -> None:
        """Has the waiting thread check again, after another thread has changed something."""
        with self._lock, contextlib.suppress(BlockingIOError):  # the pipe is full: the thread does not sleep
            if not self.is_closed:
                os.write(self.write_fd, _WAKE)

    def take(self, message: MessageId) -> Arrival:
        """Waits for a message and removes it. Raises as ``wait`` does."""
        while (item := self._arrived.pop(message, None)) is None:
            self._wait_for_headers(message.step, None)
        self.arrived, arrival = item
        return arrival

    def wait(self, step: int, ready: Callable[[], bool], poll_seconds: float | None = None) -> None:
        """Waits until ``ready()``, which is called after each event.

        If no event reports the condition, ``ready`` is also called after ``poll_seconds``, after twice that
        time, and so on, with at most ``_MAX_POLL_SECONDS`` between two calls.

        Raises: ``StepAborted`` when the step is aborted, or a peer was lost and the driver does not say why.
        """
        while not ready():
            self._wait_for_headers(step, poll_seconds)
            if poll_seconds is not None:
                poll_seconds = min(2 * poll_seconds, _MAX_POLL_SECONDS)

    def _wait_for_headers(self, step: int, seconds: float | None) -> None:
        """Waits for headers for ``seconds`` at most, and passes them to their listeners."""
        if step in self._aborted:
            raise StepAborted(self._aborted[step])
        # Headers of a lost peer are still read.
        if (lost := self._lost_peer()) is not None and not self._poll.poll(0):
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
        taking_part = self._taking_part
        lost = list(self._disconnected)  # other threads add to it
        return next((process for process in lost if taking_part is None or process in taking_part), None)

    def _seconds_for_reason(self, process: int) -> float:
        """Seconds for which the driver may still say why a peer was lost; raises when there are none."""
        loss = self._disconnected[process]
        remaining = loss.since + ABORT_REASON_SECONDS - time.monotonic()
        if remaining <= 0:
            self.lost = self.lost or PeerLostError(loss.reason, loss.culprit)
            raise StepAborted(f"{self.name_of(process)} is gone: {loss.reason}")
        return remaining

    def mark_disconnected(self, process: int, reason: str = "its process has closed its connections") -> None:
        """Records that a peer was lost."""
        self._disconnected.setdefault(process, _Loss(time.monotonic(), reason, process))
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
        self._disconnected.setdefault(process, _Loss(since, reason, culprit))
        self.wake()

    def abort(self, step: int, reason: str) -> None:
        """Ends every wait of a step, now and later, and drops its messages."""
        with self._lock:
            if step >= self._step:
                self._aborted.setdefault(step, reason)
            dropped = [self._arrived.pop(m, None) for m in list(self._arrived) if m.step == step]
        for item in dropped:
            if item is not None:  # the waiting thread takes messages without the lock
                item[1].drop()
        self.wake()

    def close(self) -> None:
        """Closes the pipe. No thread may wait any more."""
        with self._lock:
            self.is_closed = True
            os.close(self._read_fd)
            os.close(self.write_fd)
