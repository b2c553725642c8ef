"""Counts what Python does for a step and a task of tiny steps, in process and on Ray: ``overhead --path``.

Times depend on the machine and its load; these counts depend on the code alone, so that two commits compare.
Thread switches within C code, what XLA does, and locks of actors are not counted.
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

from benchmarks.frame import Row, Setup, in_process_mesh
from benchmarks.workload import Workload, tiny

CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "time", "process_time_ns")
DIGESTS = ("add_message", "digest", "digest_of", "crc32", "blake2b")
HANDED_OVER = ("put", "notify", "set_result")
STEPS = 9
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


def path_counts(setup: Setup, groups: int = 2, microbatches: int = 8) -> Iterator[Row]:
    """The counts of a step; of a task: the difference of two steps, by the difference of their tasks."""
    for open_mesh in (in_process_mesh, functools.partial(_on_ray, setup)):
        small, tasks = _count_steps(tiny(groups, microbatches), open_mesh)
        large, more_tasks = _count_steps(tiny(groups, 2 * microbatches), open_mesh)
        for where in small:
            for kind in KINDS:
                of_task = (large[where][kind] - small[where][kind]) / (more_tasks - tasks)
                beside = small[where][kind] - of_task * tasks
                yield {"": where, "of": kind, "a task": of_task, "a step beside its tasks": beside}


def _on_ray(setup: Setup, groups: int) -> Any:
    return setup.launch({"stage": groups}, "stage")


def _count_steps(case: Workload, open_mesh: Callable[[int], Any]) -> tuple[dict[str, dict[str, float]], int]:
    """Returns the median counts of a step by process, and its number of tasks."""
    import mpmd
    from benchmarks import model  # imports JAX, which the command does without

    with PathCounts() as counter:
        is_here = open_mesh is in_process_mesh
        if not is_here:
            threading.setprofile(counter.record)  # of the threads that receive replies
        mesh = open_mesh(case.groups)
        threading.setprofile(None)
        state, batch = model.init_state(case), model.batch(case)
        step = mpmd.jit(model.train_step(case), mesh, donate_argnums=0).compile(state, *batch)

        def train() -> None:
            nonlocal state
            state, loss = step(state, *batch)
            float(loss)

        if is_here:  # after the compilation, which would take minutes
            for group in mesh.runtime._groups:
                group.submit(functools.partial(sys.setprofile, counter.record)).result()
        else:
            _ask_actors(mesh, _begin_to_count)
        for _ in range(3):  # which bring the arguments to the groups, and fill caches of JAX
            train()
        before = {} if is_here else {"groups": _counts_of_actors(mesh)}
        recorded = [counter.of(train) for _ in range(STEPS)]
        counts = {kind: statistics.median(each[kind] for each in recorded) for kind in KINDS}
        found = {"in process" if is_here else "driver": counts}
        for where, earlier in before.items():
            later = _counts_of_actors(mesh)
            found[where] = {kind: (later[kind] - earlier[kind]) / STEPS for kind in KINDS}
        tasks = sum(len(program.runs) for program in step.plan.programs)
        mesh.close()
    return found, tasks


def _ask_actors(mesh: Any, call: Callable[[Any], Any]) -> list[Any]:
    import ray

    return ray.get([actor.__ray_call__.remote(call) for actor in mesh.runtime.actors])


def _begin_to_count(actor: Any) -> None:
    """In an actor: counts in the thread that answers the driver, from its next request on."""
    counter, answer = PathCounts(), actor._worker.answer

    def counted(request: Any) -> Any:
        sys.setprofile(counter.record)
        return answer(request)

    actor._worker.answer, actor.path_counts = counted, counter.counts


def _counts_of_actors(mesh: Any) -> collections.Counter[str]:
    return sum(_ask_actors(mesh, lambda actor: actor.path_counts), collections.Counter())
