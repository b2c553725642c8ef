"""Finds processes that were told to end, because their nodes are about to."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.actor import ActorHandle


class TerminationNotices:
    """Waits for processes to be told to end, without a thread. Processes are named by their numbers."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[ActorHandle, ray.ObjectRef]] = {}

    def told(self, actors: Sequence[ActorHandle]) -> set[int]:
        """Returns the indices of ``actors``, one for each process, that were told to end and still run."""
        for number, actor in enumerate(actors):
            if number not in self._waiting or self._waiting[number][0] is not actor:
                self._waiting[number] = actor, actor.await_notice.remote()
        calls = {notice: number for number, (_, notice) in self._waiting.items()}
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        told = set()
        for notice in ready:
            try:
                ray.get(notice)
                told.add(calls[notice])
            except ray.exceptions.RayError:  # dead, or out of reach: asked again, until it is replaced
                del self._waiting[calls[notice]]
        return told
