"""Messages that have arrived at one group and were not yet received."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import NamedTuple

from mpmd.errors import StepAborted
from mpmd.runtime.transport import Array, MessageId


class _Arrival(NamedTuple):
    message: MessageId
    arrays: Sequence[Array]
    time: int


class _Abort(NamedTuple):
    step: int
    reason: str


class Mailbox:
    """Takes in messages from any thread, for one thread that receives them.

    Everything that arrives goes into a queue, on which a thread can wait at almost no cost. The receiving
    thread sorts the messages that it takes from the queue. It runs steps in ascending order, so it drops
    messages of earlier steps.

    Attributes:
      arrived: when the message that was taken last had been delivered, in nanoseconds of
        ``time.perf_counter_ns``.
    """

    def __init__(self) -> None:
        self.arrived = 0
        self._arriving: queue.SimpleQueue[_Arrival | _Abort] = queue.SimpleQueue()
        self._arrived: dict[MessageId, _Arrival] = {}
        self._aborted: dict[int, str] = {}
        self._step = 0

    def deliver(self, message: MessageId, arrays: Sequence[Array]) -> None:
        """Adds a message. May be called from any thread."""
        self._arriving.put(_Arrival(message, arrays, time.perf_counter_ns()))

    def abort(self, step: int, reason: str) -> None:
        """Ends the waiting for messages of a step, now and later, and drops the step's messages that have
        arrived.

        May be called from any thread.
        """
        self._arriving.put(_Abort(step, reason))

    def begin_step(self, step: int) -> None:
        """Drops messages of earlier steps. To be called by the receiving thread."""
        self._step = step
        while not self._arriving.empty():
            self._process(self._arriving.get())
        self._aborted = {number: reason for number, reason in self._aborted.items() if number >= step}
        self._arrived = {message: item for message, item in self._arrived.items() if message.step >= step}

    def take(self, message: MessageId) -> Sequence[Array]:
        """Waits for a message and removes it. Raises ``StepAborted`` when its step was aborted."""
        while message not in self._arrived:
            if message.step in self._aborted:
                raise StepAborted(self._aborted[message.step])
            self._process(self._arriving.get())
        arrival = self._arrived.pop(message)
        self.arrived = arrival.time
        return arrival.arrays

    def _process(self, item: _Arrival | _Abort) -> None:
        match item:
            case _Arrival(message):
                if message.step >= self._step and message.step not in self._aborted:
                    self._arrived[message] = item
            case _Abort(step, reason):
                self._aborted.setdefault(step, reason)
                for message in [message for message in self._arrived if message.step == step]:
                    del self._arrived[message]
