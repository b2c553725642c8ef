"""How many steps the driver may be ahead of the groups."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future

from mpmd.validation import int_fault, raise_faults

MAX_IN_FLIGHT = 16
"""Steps that are submitted and not answered, by default: enough for a driver that is sometimes late."""


class StepsInFlight:
    """Lets a limited number of steps be under way, whose arguments both ends hold. Thread-safe.

    Raises: ``TypeError`` or ``ValueError`` for a limit that is no positive int.
    """

    def __init__(self, limit: int = MAX_IN_FLIGHT):
        raise_faults(int_fault("max_in_flight", limit))
        self._places = threading.Semaphore(limit)

    def enter(self) -> None:
        """Waits until the next step may be submitted; then ``leave`` or ``leave_after``."""
        self._places.acquire()

    def leave(self) -> None:
        """The step was not submitted."""
        self._places.release()

    def leave_after(self, replies: Collection[Future]) -> None:
        """The step ends when all groups have replied, or have failed to."""
        on_reply = _countdown(len(replies), self._places.release)
        for reply in replies:
            reply.add_done_callback(on_reply)


def _countdown(count: int, done: Callable[[], None]) -> Callable[[Future], None]:
    replies = itertools.count(1)

    def on_reply(_: Future) -> None:  # is called in several threads, each of which gets another number
        if next(replies) == count:
            done()

    return on_reply
