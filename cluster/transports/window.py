"""How far a sender may be ahead of its reader."""

from __future__ import annotations


class Window:
    """Counts the messages of one edge: a sender may be one step ahead of its reader.

    So no sender waits within a step, in whatever order the messages are read, and what is on its way is at
    most what two steps send. It cannot deadlock: of all groups that are at the earliest step, none waits.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._sent = 0
        self._sent_before = 0  # the step that is being sent
        self._needed = 0  # messages that must have been read before more are sent

    def admits(self, step: int, taken: int) -> bool:
        """Whether a message of ``step`` may be sent when ``taken`` of all messages so far have been read."""
        if step != self._step:
            self._step, self._needed, self._sent_before = step, self._sent_before, self._sent
        return taken >= self._needed

    def note_sent(self) -> None:
        self._sent += 1
