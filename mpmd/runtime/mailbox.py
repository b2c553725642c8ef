"""Messages that have arrived at one group and were not yet taken."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import NamedTuple

from mpmd.errors import StepAborted
from mpmd.runtime.transport import Array, MessageId


class _Delivery(NamedTuple):
    message: MessageId
    arrays: Sequence[Array]


class _Abort(NamedTuple):
    step: int
    reason: str


class Mailbox:
    """Takes in messages from any thread, for one thread that waits for them.

    What arrives goes through a queue, whose waiting costs next to nothing, and is filed by the thread that
    looks for something.
    """

    def __init__(self) -> None:
        self._arriving: queue.SimpleQueue[_Delivery | _Abort] = queue.SimpleQueue()
        self._arrived: dict[MessageId, Sequence[Array]] = {}
        self._aborted: dict[int, str] = {}

    def deliver(self, message: MessageId, arrays: Sequence[Array]) -> None:
        self._arriving.put(_Delivery(message, arrays))

    def abort(self, step: int, reason: str) -> None:
        """Ends the waiting for messages of a step, now and later, and drops those that have arrived."""
        self._arriving.put(_Abort(step, reason))

    def take(self, message: MessageId) -> Sequence[Array]:
        """Waits for a message and removes it. Raises ``StepAborted`` when its step was aborted."""
        while message not in self._arrived:
            if message.step in self._aborted:
                raise StepAborted(self._aborted[message.step])
            self._file(self._arriving.get())
        return self._arrived.pop(message)

    def _file(self, item: _Delivery | _Abort) -> None:
        match item:
            case _Delivery(message, arrays):
                if message.step not in self._aborted:
                    self._arrived[message] = arrays
            case _Abort(step, reason):
                self._aborted.setdefault(step, reason)
                for message in [message for message in self._arrived if message.step == step]:
                    del self._arrived[message]
