"""Counts what Python does for a step and for a task of tiny steps in process: ``overhead --path``.

Times depend on the machine and its load; these counts depend on the code alone, so that two commits compare.
Thread switches within C code, and what XLA does, are not counted.
"""

from __future__ import annotations

import collections
import functools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from benchmarks.frame import Row, in_process_mesh
from benchmarks.workload import tiny

CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "time", "process_time_ns")
DIGESTS = ("add_message", "digest", "digest_of", "crc32", "blake2b")
HANDED_OVER = ("put", "notify", "set_result")
KINDS = ("Python calls", "C calls", "locks", "objects", "clock reads", "digests", "hand-overs")


class PathCounts:
    """Counts locks that are made within this context, and the calls of ``of`` and of threads that ``record``.

    ``objects`` are instances of Python classes that have an ``__init__`` or ``__new__`` in Python.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._originals = threading.Lock, threading.RLock

    def __enter__(self) -> PathCounts:
        counts = self.counts

        def counted(kind: Any) -> type:
            class Lock:
                """A lock that counts: the profiler does not see a lock taken by ``with``."""

                def __init__(self) -> None:
                    self._lock = kind()

                def __enter__(self) -> None:
                    counts["locks"] += 1
                    self._lock.acquire()

                def __exit__(self, *exception: object) -> None:
                    self._lock.release()

                def acquire(self, *arguments: Any, **options: Any) -> bool:
                    counts["locks"] += 1
                    return self._lock.acquire(*arguments, **options)

                def __getattr__(self, name: str) -> Any:
                    return getattr(self._lock, name)

            return Lock

        threading.Lock, threading.RLock = map(counted, self._originals)  # type: ignore[misc]
        return self

    def __exit__(self, *exception: object) -> None:
        threading.Lock, threading.RLock = self._originals  # type: ignore[misc]

    def of(self, call: Callable[[], object]) -> dict[str, int]:
        """The counts of a call by this thread, and of what other threads do until they are quiet."""
        before = collections.Counter(self.counts)
        sys.setprofile(self.record)
        try:
            call()
        finally:
            sys.setprofile(None)
        self._wait_until_quiet()
        return {kind: self.counts[kind] - before[kind] for kind in KINDS}

    def _wait_until_quiet(self) -> None:
        """Waits until no thread has made a call for a while: until all groups have ended the step."""
        before = -1
        while before != (now := sum(self.counts.values())):
            before = now
            time.sleep(0.1)

    def record(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename == __file__:
            return
        if event == "call":
            name = code.co_name
            self.counts["Python calls"] += 1
            self.counts["objects"] += name in ("__init__", "__new__")
        elif event == "c_call":
            name = argument.__name__
            self.counts["C calls"] += 1
            self.counts["clock reads"] += name in CLOCKS
        else:
            return
        self.counts["digests"] += name in DIGESTS
        self.counts["hand-overs"] += name in HANDED_OVER


def _count_step(groups: int, microbatches: int, steps: int) -> tuple[dict[str, float], int]:
    """Returns the median counts of a step, and its number of tasks."""
    import mpmd
    from benchmarks import model  # imports JAX, which the command does without

    case = tiny(groups, microbatches)
    with PathCounts() as counter:
        mesh = in_process_mesh(groups)
        state, batch = model.init_state(case), model.batch(case)
        step = mpmd.jit(model.train_step(case), mesh, donate_argnums=0).compile(state, *batch)

        def train() -> None:
            nonlocal state
            state, loss = step(state, *batch)
            float(loss)

        for group in mesh.runtime._groups:  # after the compilation, which would take minutes
            group.submit(functools.partial(sys.setprofile, counter.record)).result()
        for _ in range(3):  # which bring the arguments to the groups, and fill caches of JAX
            train()
        recorded = [counter.of(train) for _ in range(steps)]
        tasks = sum(len(program.runs) for program in step.plan.programs)
        mesh.close()
    return {kind: statistics.median(each[kind] for each in recorded) for kind in KINDS}, tasks


def path_counts(groups: int = 2, microbatches: int = 8, steps: int = 9) -> Iterator[Row]:
    """The counts of a step; of a task: the difference of two steps, by the difference of their tasks."""
    small, tasks = _count_step(groups, microbatches, steps)
    large, more_tasks = _count_step(groups, 2 * microbatches, steps)
    for kind in KINDS:
        of_task = (large[kind] - small[kind]) / (more_tasks - tasks)
        yield {"of": kind, "a task": of_task, "a step beside its tasks": small[kind] - of_task * tasks}
