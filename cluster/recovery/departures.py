"""Which groups of a mesh are to move to other places, and the processes that are started there before."""

from __future__ import annotations

import time

from cluster.recovery.fleet import Fleet
from cluster.recovery.places import PROMPT_SECONDS
from cluster.recovery.termination import TerminationNotices

_AVOID_SECONDS = 300.0
"""A node of which a process was told to end, and that is still there after this time, is not about to end."""


class Departures:
    """Knows which processes have to leave their nodes. Used by one thread at a time."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self._notices = TerminationNotices()
        self._avoided: dict[str, float] = {}  # nodes, and since when

    def misplaced(self) -> dict[int, str]:
        """The groups that are to move, and why: ``drained``, ``shrunk`` or ``grown``."""
        now = time.monotonic()
        for number in self._notices.told(self._fleet.actors):
            self._avoided.setdefault(self._fleet.infos[number].node_id, now)
        self._avoided = {node: since for node, since in self._avoided.items() if now - since < _AVOID_SECONDS}
        self._fleet.places.avoided = frozenset(self._avoided)
        return self._fleet.places.misplaced()

    def prepare(self, mpmd_idx: int, may_use_spares: bool) -> bool:
        """Has processes ready that a group is to be replaced with, and returns whether it is to be replaced.

        It is not, when there is no better place for it, unless its processes were told to end.
        Raises: ``RuntimeError`` when the processes cannot be had.
        """
        fleet = self._fleet
        numbers = fleet.places.numbers_of(mpmd_idx)
        if may_use_spares and fleet.replacements.count_ready_spares() >= len(numbers):
            return True
        found = fleet.places.find(mpmd_idx, fleet.infos, seconds=PROMPT_SECONDS, check=fleet.check_open)
        elsewhere = {number: place for number, place in found.items() if place != fleet.places.of(number)}
        if elsewhere:
            fleet.replacements.prepare(elsewhere, fleet.timeout)
        return bool(elsewhere or self._notices.told(fleet.actors) & set(numbers))
