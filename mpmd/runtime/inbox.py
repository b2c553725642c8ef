"""The messages that have arrived for one group or process, and the wait of the thread that takes them."""

from __future__ import annotations

import queue
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
    arrays: Sequence[Array]

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        return self.arrays

    def drop(self) -> None:
        pass


class Inbox:
    """The messages that have arrived and were not yet taken.

    One thread, which runs the group's programs, waits here. Other threads ``add`` messages and then ``wake``
    it. Only that thread may call ``begin_step`` and ``take``; any thread may call the other methods.

    No lock is taken. ``begin_step`` and ``abort`` note which steps are over before they look for messages,
    and ``add`` looks for steps that are over after it has stored its message. So one of two threads finds a
    message that is to be dropped, and the thread that removes it from the dict drops it.

    Attributes:
      step: the last step that was begun.
      arrived: when the message that was taken last had arrived, in nanoseconds of ``time.perf_counter_ns``.
    """

    def __init__(self) -> None:
        self.arrived = 0
        self._unread_since = time.perf_counter_ns()  # what the waiting thread reads next was written later
        self.step = 0
        self._arrived: dict[MessageId, tuple[int, Arrival]] = {}
        self._aborted: dict[int, str] = {}
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def begin_step(self, step: int) -> None:
        """Begins a step: earlier steps do not run any more, and their state is forgotten.

        The numbers of steps ascend. Messages of earlier steps, which can only have been aborted, are dropped,
        also messages that arrive later.
        """
        self.step = step
        for number in [number for number in list(self._aborted) if number < step]:
            del self._aborted[number]
        self._drop([message for message in list(self._arrived) if message.step < step])

    def add(self, message: MessageId, arrival: Arrival, written: int | None = None) -> None:
        """Adds a message that has arrived; drops it when its step is over or aborted.

        Args:
          written: when the sender has written the message, by its clock; ``None``: it has come now. A time
            before the waiting thread last looked for messages, or after now, is moved into that interval.
        """
        now = time.perf_counter_ns()
        at = now if written is None else min(max(written, self._unread_since), now)
        self._arrived[message] = at, arrival
        if message.step < self.step or message.step in self._aborted:
            self._drop([message])

    def _drop(self, messages: Sequence[MessageId]) -> None:
        for message in messages:
            if (item := self._arrived.pop(message, None)) is not None:  # no other thread has taken it
                item[1].drop()

    def wake(self) -> None:
        if self._woken.empty():  # if not, the thread has still to check, and sees the change
            self._woken.put(None)

    def take(self, message: MessageId) -> Arrival:
        """Waits for a message and removes it. Raises ``StepAborted`` when its step was aborted."""
        while (item := self._arrived.pop(message, None)) is None:
            self._wait_for_event(message.step)
        self.arrived, arrival = item
        return arrival

    def _wait_for_event(self, step: int) -> None:
        if step in self._aborted:
            raise StepAborted(self._aborted[step])
        self._woken.get()

    def abort(self, step: int, reason: str) -> None:
        """Ends every wait of a step, now and later, and drops its messages."""
        if step >= self.step:
            self._aborted.setdefault(step, reason)
        self._drop([message for message in list(self._arrived) if message.step == step])
        self.wake()
