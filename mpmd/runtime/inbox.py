"""The messages that have arrived for one group or process, and the wait of the thread that takes them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax

from mpmd.errors import StepAborted
from mpmd.runtime.transport import Array, MessageId


class Arrival(Protocol):
    """A message that has arrived. Exactly one of the methods is called, once."""

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        """Returns the values. Raises ``StepAborted`` when they were lost on the way."""
        ...

    def drop(self) -> None:
        """Discards the message, because its step was aborted. Called from any thread."""
        ...


class ArrayArrival(NamedTuple):
    """A message whose arrays are where their reader wants them."""

    arrays: Sequence[Array]

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        return self.arrays

    def drop(self) -> None:
        pass


class Inbox:
    """The messages that have arrived and were not yet taken.

    One thread, which runs the group's programs, waits here. Other threads ``add`` messages and then ``wake``
    it. Only that thread may call ``begin_step`` and ``take``; any thread may call the other methods.

    Attributes:
      arrived: when the message that was taken last had arrived, in nanoseconds of ``time.perf_counter_ns``.
    """

    def __init__(self) -> None:
        self.arrived = 0
        self._unread_since = time.perf_counter_ns()  # what the waiting thread reads next was written later
        self._lock = threading.Lock()
        self._step = 0
        self._arrived: dict[MessageId, tuple[int, Arrival]] = {}
        self._aborted: dict[int, str] = {}
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def begin_step(self, step: int) -> None:
        """Begins a step: earlier steps do not run any more, and their state is forgotten.

        The numbers of steps ascend. Messages of earlier steps, which can only have been aborted, are dropped,
        also messages that arrive later.
        """
        with self._lock:
            self._step = step
            self._aborted = {number: why for number, why in self._aborted.items() if number >= step}
            outdated = [self._arrived.pop(message) for message in list(self._arrived) if message.step < step]
        for _, arrival in outdated:
            arrival.drop()

    def add(self, message: MessageId, arrival: Arrival, written: int | None = None) -> None:
        """Adds a message that has arrived; drops it when its step is over or aborted.

        Args:
          written: when the sender has written the message, by its clock; ``None``: it has come now. A time
            before the waiting thread last looked for messages, or after now, is moved into that interval.
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
        if self._woken.empty():  # if not, the thread has still to check, and sees the change
            self._woken.put(None)

    def take(self, message: MessageId) -> Arrival:
        """Waits for a message and removes it. Raises ``StepAborted`` when its step was aborted."""
        while (item := self._arrived.pop(message, None)) is None:
            self._wait_for_event(message.step)
        self.arrived, arrival = item
        return arrival

    def _wait_for_event(self, step: int) -> None:
        """Waits for ``wake``. Raises ``StepAborted`` when the step is aborted."""
        if step in self._aborted:
            raise StepAborted(self._aborted[step])
        self._woken.get()

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
