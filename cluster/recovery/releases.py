"""The values and programs that the user has released, and groups are to drop with a later request."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from cluster.driver.runtime import LoadRequests, RayRuntime
from cluster.recovery.journal import Journal
from mpmd.runtime.protocol import ReleaseQueue
from mpmd.runtime.requests import Released


class Releases:
    """Values and programs for groups to drop, unless a replay needs them. Only ``unload`` is thread-safe.

    Args:
      groups: drop programs.
      journal: knows which programs and copies a replay needs.
      queue: handles that the user has released and groups were not told to drop yet.

    Attributes:
      loads: by program number, the requests by which the groups loaded the program.
    """

    def __init__(self, groups: RayRuntime, journal: Journal, queue: ReleaseQueue):
        self.loads: dict[int, LoadRequests] = {}
        self._groups = groups
        self._journal = journal
        self._queue = queue
        self._unloaded = collections.deque[int]()  # programs that the user needs no more; a replay may

    def unload(self, number: int) -> None:
        """The user needs a program no more. May be called at any point of any thread."""
        self._unloaded.append(number)

    def unload_unused(self) -> None:
        """Has groups drop, with their next request, the programs that neither user nor replay needs."""
        needed = self._journal.programs if self._unloaded else set[int]()
        for _ in range(len(self._unloaded)):
            number = self._unloaded.popleft()
            if number in needed:
                self._unloaded.append(number)
                continue
            self.loads.pop(number, None)
            self._groups.unload(number)

    def take(self, groups: Iterable[int]) -> dict[int, Released]:
        """The values that groups are to drop with a request; a copy among them need not be made again."""
        released = {i: self._queue.take(i) for i in groups}
        if self._journal.keeps_copies:
            self._journal.drop_copies({handle for each in released.values() for handle in each.handles})
        return released

    def give_back(self, released: Mapping[int, Released]) -> None:
        """Queues handles for release again, since groups were not told to drop them."""
        for mpmd_idx, each in released.items():
            self._queue.add(mpmd_idx, each)
