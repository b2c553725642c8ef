"""Repeats calls: until their time is steady, and for a while."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

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


def repeat(call: Callable[[], Result], seconds: float) -> list[Result]:
    """Calls for about ``seconds``, ``LEAST_CALLS`` times at least. Returns the results in order."""
    results, end = list[Result](), time.perf_counter() + seconds
    while len(results) < LEAST_CALLS or time.perf_counter() < end:
        results.append(call())
    return results
