"""Repeats several calls at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mpmd.compat import trace_context_for_threads

LEAST_CALLS = 3

Result = TypeVar("Result")


def repeat_together(calls: Sequence[Callable[[], Result]], seconds: float) -> list[list[Result]]:
    """Makes each call in a thread of its own, until all have been made often enough.

    Args:
      seconds: for how long they are repeated; each three times at least.

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
