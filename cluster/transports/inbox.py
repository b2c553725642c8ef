"""Where the messages for one group arrive, whichever way they come, and where the group waits for them."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import jax

from mpmd.errors import StepAborted
from mpmd.runtime.transport import Array, MessageId

PATIENCE_SECONDS = 5.0
"""For so long a group that has lost a peer waits to be told by the driver, which knows the reason."""

_LONGEST_SECONDS = 0.02
"""Who has to look for what no event tells, looks at least so often."""

HEADER = struct.Struct("<iiqII")  # source, tag, step, and two numbers that the source explains
_MOST_HEADERS = 64
_NOBODY = -1
_WAKE = HEADER.pack(_NOBODY, 0, 0, 0, 0)

Listener = Callable[[int, int, int, int], None]
"""Is given the tag, the step and the two numbers of a header."""


class Arrival(Protocol):
    """A message that has arrived: exactly one of the methods is called, once."""

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        """The values. Raises ``StepAborted`` when they were lost on the way."""
        ...

    def drop(self) -> None:
        """Gives the message up, because its step was aborted. Called from any thread."""
        ...


class Inbox:
    """The messages that have arrived for one group and that nobody has opened.

    One thread, which runs the group's programs, waits here. It sleeps in the reading of a pipe, and so uses
    no processor: processes of this node write headers to the pipe, which the thread hands to the listeners;
    other threads of this process ``add`` messages, and ``wake`` it. All but ``take`` and ``wait`` may be
    called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[MessageId, Arrival] = {}
        self._aborted: dict[int, str] = {}
        self._lost: dict[int, float] = {}
        self._listeners: dict[int, Listener] = {}
        self._pipe, self.mouth = os.pipe()
        os.set_blocking(self.mouth, False)
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)

    def listen(self, mpmd_idx: int, listener: Listener) -> None:
        """Has the waiting thread call ``listener`` with each header that a group writes to ``mouth``."""
        self._listeners[mpmd_idx] = listener

    def add(self, message: MessageId, arrival: Arrival) -> None:
        """Takes in a message."""
        with self._lock:
            if message.step not in self._aborted:
                self._arrived[message] = arrival
                return
        arrival.drop()

    def wake(self) -> None:
        """Has the waiting thread look again, after another one has changed something."""
        with contextlib.suppress(BlockingIOError):  # there is enough in the pipe to wake it
            os.write(self.mouth, _WAKE)

    def take(self, message: MessageId) -> Arrival:
        """Waits for a message and removes it. Raises as ``wait`` does."""
        while (arrival := self._arrived.pop(message, None)) is None:
            self._serve(message.step, None)
        return arrival

    def wait(self, step: int, ready: Callable[[], bool], look_every: float | None = None) -> None:
        """Waits until ``ready()``, which is looked at after each event, and after ``look_every`` seconds,
        twice that, and so on up to ``_LONGEST_SECONDS``.

        Raises: ``StepAborted`` when the step is aborted, or a peer was lost and nobody says why.
        """
        while not ready():
            self._serve(step, look_every)
            if look_every is not None:
                look_every = min(2 * look_every, _LONGEST_SECONDS)

    def _serve(self, step: int, seconds: float | None) -> None:
        """Waits for headers, not longer than that, and hands them to their listeners."""
        if step in self._aborted:
            raise StepAborted(self._aborted[step])
        if self._lost and not self._poll.poll(0):  # those that are there are still heard
            patience = self._patience()
            seconds = patience if seconds is None else min(seconds, patience)
        if seconds is not None and not self._poll.poll(seconds * 1000):
            return
        for source, *header in HEADER.iter_unpack(os.read(self._pipe, _MOST_HEADERS * HEADER.size)):
            if source != _NOBODY:
                self._listeners[source](*header)

    def _patience(self) -> float:
        """Seconds that are left before a lost peer is a reason to give up."""
        mpmd_idx, since = next(iter(self._lost.items()))
        left = since + PATIENCE_SECONDS - time.monotonic()
        if left <= 0:
            raise StepAborted(f"group {mpmd_idx} is gone: its process has closed its connections")
        return left

    def lose(self, mpmd_idx: int) -> None:
        """Notes that a peer is gone."""
        self._lost.setdefault(mpmd_idx, time.monotonic())
        self.wake()

    def abort(self, step: int, reason: str) -> None:
        """Ends every wait of a step, now and later, and drops its messages."""
        with self._lock:
            self._aborted.setdefault(step, reason)
            dropped = [self._arrived.pop(m, None) for m in list(self._arrived) if m.step == step]
        for arrival in dropped:
            if arrival is not None:  # the waiting thread takes messages without the lock
                arrival.drop()
        self.wake()

    def close(self) -> None:
        """Ends what ``mouth`` leads to. Nobody may wait any more."""
        os.close(self._pipe)
        os.close(self.mouth)
