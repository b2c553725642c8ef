"""Limits how far a sender is ahead of its receiver."""

from __future__ import annotations

import collections
import threading


class SendWindow:
    """Counts the messages of one edge: a sender may be one step ahead of its receiver.

    So no sender waits within a step, in whatever order the messages are received, and at most the messages of
    two steps are on their way. There is no deadlock: a group at the earliest step never waits.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._sent = 0
        self._sent_before_step = 0
        self._required = 0

    def required(self, step: int) -> int:
        """The number of messages that the receiver must have taken before a message of ``step`` is sent.

        The messages sent from now on belong to ``step``.
        """
        if step != self._step:
            self._step = step
            if self._sent > self._sent_before_step:  # a step in which nothing was sent does not count
                self._required, self._sent_before_step = self._sent_before_step, self._sent
        return self._required

    def count_sent(self) -> None:
        self._sent += 1


class ReceiptWindow:
    """Counts the messages of one edge where they arrive, and finds the counts that a ``SendWindow`` needs.

    That one waits for all messages of a step, so one receipt for each step is enough. To answer each message
    would cost as much as to send a small one. Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step: int | None = None
        self._num_arrived = 0
        self._num_taken = 0
        self._needed: collections.deque[int] = collections.deque()

    def count_arrived(self, step: int) -> int | None:
        """Counts a message of a step. Returns how many were taken, if the sender needs to know now."""
        with self._lock:
            if step != self._step:
                self._step = step
                self._needed.append(self._num_arrived)
            self._num_arrived += 1
            return self._receipt()

    def count_taken(self) -> int | None:
        with self._lock:
            self._num_taken += 1
            return self._receipt()

    def _receipt(self) -> int | None:
        if not self._needed or self._num_taken < self._needed[0]:
            return None
        while self._needed and self._num_taken >= self._needed[0]:
            self._needed.popleft()
        return self._num_taken
