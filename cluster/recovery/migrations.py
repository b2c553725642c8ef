"""Finds groups that are to move to other nodes or devices, and starts their processes there before."""

from __future__ import annotations

import time

from cluster.recovery.allocations import PROMPT_SECONDS
from cluster.recovery.process_pool import ProcessPool
from cluster.recovery.report import DRAINED, REPLACED
from cluster.recovery.termination import TerminationNotices

_AVOID_SECONDS = 300.0
"""A node of which a process was told to end, and that is still there after this time, is not about to end."""


class Migrations:
    """Knows which processes have to leave their nodes. Used by one thread at a time."""

    def __init__(self, pool: ProcessPool):
        self._pool = pool
        self._notices = TerminationNotices()
        self._avoided: dict[str, float] = {}  # nodes, and since when

    def groups_to_move(self) -> dict[int, str]:
        """The groups that are to move, and why: ``drained``, ``shrunk`` or ``grown``."""
        now = time.monotonic()
        for number in self._notices.told(self._pool.actors):
            self._avoided.setdefault(self._pool.infos[number].node_id, now)
        self._avoided = {node: since for node, since in self._avoided.items() if now - since < _AVOID_SECONDS}
        self._pool.allocations.avoided = frozenset(self._avoided)
        return self._pool.allocations.groups_to_move()

    def prepare(self, mpmd_idx: int, kind: str) -> bool:
        """Has processes ready that a group is to be replaced with, and returns whether it is to be replaced.

        It is not, when there is no better allocation for it, unless it is dead, or was told to end.
        Raises: ``RuntimeError`` when the processes cannot be had.
        """
        pool = self._pool
        numbers = pool.allocations.numbers_of(mpmd_idx)
        if kind in (DRAINED, REPLACED) and pool.replacements.count_ready_spares() >= len(numbers):
            return True
        allocations = pool.allocations.find(
            mpmd_idx, pool.infos, seconds=PROMPT_SECONDS, check=pool.check_open
        )
        elsewhere = {
            number: allocation
            for number, allocation in allocations.items()
            if kind == REPLACED or allocation != pool.allocations.of(number)
        }
        if elsewhere:
            pool.replacements.prepare(elsewhere, pool.timeout)
        return bool(elsewhere or self._notices.told(pool.actors) & set(numbers))
