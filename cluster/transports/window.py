"""Limits how far a sender is ahead of its receiver."""

from __future__ import annotations


class SendWindow:
    """The last two steps in which messages of one edge were sent: a sender may be one step ahead.

    So no sender waits within a step, in whatever order the messages are received, and at most the messages of
    two steps are on their way. There is no deadlock: a group at the earliest step never waits.
    """

    def __init__(self) -> None:
        self._step = self._before = 0

    def required(self, step: int) -> int:
        """The step that the receiver must have begun before a message of ``step`` is sent; 0 for none."""
        return self._before if step == self._step else self._step

    def mark_sent(self, step: int) -> None:
        if step != self._step:
            self._before, self._step = self._step, step
