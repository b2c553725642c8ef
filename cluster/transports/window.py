"""How far a sender may be ahead of its receiver."""

from __future__ import annotations


class SendWindow:
    """Counts the messages of one edge: a sender may be one step ahead of its receiver.

    So no sender waits within a step, in whatever order the messages are received, and at most the messages of
    two steps are on their way. There is no deadlock: a group at the earliest step never waits.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._sent = 0
        self._sent_before_step = 0
        self._required = 0  # messages that must have been received before more are sent

    def begin(self, step: int) -> None:
        """The messages sent from now on belong to ``step``; may be repeated."""
        if step != self._step:
            self._step = step
            self._required, self._sent_before_step = self._sent_before_step, self._sent

    def is_open(self, num_received: int) -> bool:
        """Whether a message may be sent when so many messages have been received since the beginning."""
        return num_received >= self._required

    def count_sent(self) -> None:
        self._sent += 1
