"""Times calls: one by itself, or several on devices that have to share their host."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from mpmd.compat import trace_context_for_threads

LEAST_RUNS = 3

Span = tuple[float, float]
"""When something starts and when it ends, in seconds."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A compiled function with inputs for it.

    Attributes:
      donated: the inputs that each run takes over; it gets copies of them.
    """

    function: Callable[..., Sequence[jax.Array]]
    inputs: Sequence[jax.Array]
    donated: Sequence[int]

    def run(self) -> Span:
        """When a run starts, and when its results are there."""
        given = list(self.inputs)
        for position in self.donated:
            given[position] = jax.device_put(given[position], given[position].sharding, may_alias=False)
        jax.block_until_ready(given)
        start = time.perf_counter()
        jax.block_until_ready(self.function(*given))
        return start, time.perf_counter()


def seconds_together(calls: Sequence[Call], seconds: float) -> float:
    """The median of the seconds that a call takes while the others run as well, again and again.

    Args:
      calls: of which each is made in a thread of its own.
      seconds: for which each is repeated; three times at least.
    """
    for call in calls:
        call.run()  # the first run is slower
    ready = threading.Barrier(len(calls))

    def repeat(call: Call) -> list[Span]:
        with context():
            ready.wait()
            end, runs = time.perf_counter() + seconds, [call.run()]
            while len(runs) < LEAST_RUNS or runs[-1][1] < end:
                runs.append(call.run())
        return runs

    context = trace_context_for_threads()
    with ThreadPoolExecutor(len(calls)) as threads:
        found = [future.result() for future in [threads.submit(repeat, call) for call in calls]]
    return statistics.median(while_all_run(found))


def while_all_run(spans: Sequence[Sequence[Span]]) -> list[float]:
    """The seconds of what starts before any of several threads has ended: then others have more of the host.

    Args:
      spans: of each thread, in order.
    """
    until = min(of_thread[-1][1] for of_thread in spans)
    return [end - start for of_thread in spans for start, end in of_thread if start < until]
