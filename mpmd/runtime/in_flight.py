"""Limits the steps that the driver has submitted and the groups have not answered."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future

from mpmd.runtime.step_future import call_when_done
from mpmd.validation import int_fault, raise_faults

MAX_IN_FLIGHT = 16
"""Steps that are submitted and not answered, by default: enough for a driver that is sometimes late."""


class StepsInFlight:
    """Lets a limited number of steps of each part be under way, whose arguments both ends hold. Thread-safe.

    Parts have their names; ``None`` is the whole mesh.

    Raises: ``TypeError`` or ``ValueError`` for a limit that is no positive int.
    """

    def __init__(self, limit: int):
        raise_faults(int_fault("max_in_flight", limit))
        self._places: dict[str | None, threading.Semaphore]
        self._places = collections.defaultdict(functools.partial(threading.Semaphore, limit))

    def enter(self, part: str | None = None) -> None:
        """Waits until the next step of a part may be submitted; then ``leave`` or ``leave_after``."""
        self._places[part].acquire()

    def leave(self, part: str | None = None) -> None:
        """Undoes ``enter`` for a step that was not submitted."""
        self._places[part].release()

    def leave_after(
        self,
        replies: Collection[Future],
        on_end: Callable[[bool], object] = lambda has_failed: None,
        part: str | None = None,
    ) -> None:
        """The step ends when all groups have replied, or have failed to.

        Args:
          on_end: is called then, in any thread, with whether the step has failed.
        """

        def end(has_failed: bool) -> None:
            on_end(has_failed)
            self._places[part].release()

        call_when_done(replies, end)
