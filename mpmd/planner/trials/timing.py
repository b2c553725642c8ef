"""Repeats calls: one until its time is steady, several at the same time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mpmd.compat import trace_context_for_threads

LEAST_CALLS = 5
MOST_WARM_UPS = 6
STEADY = 0.95
"""A call that takes more than this share of the time of the quickest one before it is no warm-up."""

Result = TypeVar("Result")


def warm_up(call: Callable[[], float]) -> None:
    """Repeats a call until it is no longer quicker than before, ``MOST_WARM_UPS`` times at most.

    The first calls of a process fill caches and get memory from the system.

    Args:
      call: returns its seconds.
    """
    quickest = math.inf
    for _ in range(MOST_WARM_UPS):
        seconds = call()
        if seconds > STEADY * quickest:
            break
        quickest = seconds


def repeat_together(calls: Sequence[Callable[[], Result]], seconds: float) -> list[list[Result]]:
    """Makes each call in a thread of its own, until all have been made often enough.

    Args:
      seconds: for how long they are repeated; each ``LEAST_CALLS`` times at least.

    Returns: for each call, its results in order.
    Raises: the error of a call, after which no other call begins.
    """
    counts = [0] * len(calls)
    has_failed = threading.Event()
    end = time.perf_counter() + seconds

    def repeat(number: int) -> list[Result]:
        results = []
        with context():
            while not has_failed.is_set() and (min(counts) < LEAST_CALLS or time.perf_counter() < end):
                try:
                    results.append(calls[number]())
                except BaseException:
                    has_failed.set()
                    raise
                counts[number] += 1
        return results

    context = trace_context_for_threads()
    with ThreadPoolExecutor(len(calls)) as threads:
        return [
            future.result() for future in [*map(threads.submit, [repeat] * len(calls), range(len(calls)))]
        ]
