"""The gate at which the driver can stop steps that a group has not begun."""

from __future__ import annotations

import threading
from collections.abc import Collection


class StepGate:
    """Lets a group begin its steps, one after the other, unless the driver drops them. Thread-safe.

    To drop steps, the driver holds the gates of all groups, reads the last step that any of them has begun,
    and opens them again with those of the later steps that are dropped: so each step runs on all groups, or
    on none.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = -1
        self._dropped: frozenset[int] = frozenset()
        self._is_held = False
        self._opened = -1

    def begin(self, step: int) -> bool:
        """Whether the group is to run a step. Waits while the gate is held. Steps ascend."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            is_dropped = step in self._dropped
            self._dropped = frozenset(later for later in self._dropped if later > step)
            if not is_dropped:
                self._begun = step
            return not is_dropped

    def hold(self, number: int) -> int:
        """Closes the gate until ``open``, and returns the last step that the group has begun, or -1.

        Args:
          number: one that ascends; it does nothing after ``open`` with this number, which may overtake it.
        """
        with self._changed:
            self._is_held = number > self._opened
            return self._begun

    def open(self, number: int, dropped: Collection[int]) -> None:
        """Ends the hold with a number; these steps, which are to come, are dropped."""
        with self._changed:
            self._opened = number
            self._is_held = False
            self._dropped |= frozenset(dropped)
            self._changed.notify_all()
