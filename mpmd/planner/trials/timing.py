"""Calls that are made at the same time, each again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mpmd.compat import trace_context_for_threads

LEAST_CALLS = 3

Found = TypeVar("Found")


def repeat_together(calls: Sequence[Callable[[], Found]], seconds: float) -> list[list[Found]]:
    """Makes each call in a thread of its own, until all have been made often enough.

    Args:
      seconds: for which they are repeated; each three times at least.

    Returns: what each call has returned, each time.
    Raises: what a call raises, after which no other call begins.
    """
    counts = [0] * len(calls)
    has_failed = threading.Event()
    end = time.perf_counter() + seconds

    def repeat(number: int) -> list[Found]:
        found = []
        with context():
            while not has_failed.is_set() and (min(counts) < LEAST_CALLS or time.perf_counter() < end):
                try:
                    found.append(calls[number]())
                except BaseException:
                    has_failed.set()
                    raise
                counts[number] += 1
        return found

    context = trace_context_for_threads()
    with ThreadPoolExecutor(len(calls)) as threads:
        return [
            future.result() for future in [*map(threads.submit, [repeat] * len(calls), range(len(calls)))]
        ]
