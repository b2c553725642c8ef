"""Counts the steps of each function on the driver, by the replies of groups that it waits for anyway.

Calls and ends of steps enter from ``mpmd/step/``; the counts of a ``StepMeter``, and ``StepEnd`` for
listeners, leave to ``mpmd.metrics`` and ``cluster/metrics.py``. A step costs two readings of the clock;
groups are asked nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from mpmd.runtime.device_memory import MemoryUse
from mpmd.runtime.requests import StepReply

RECENT = 16
"""The number of steps over which the current rate is taken."""

_POLL_SECONDS = 0.01
"""The seconds between two looks of ``wait``: no step pays for somebody who waits."""

MEMORY_SECONDS = 1.0
"""The least time between two steps whose replies have the memory in use, which takes time to read."""


class StepEnd(NamedTuple):
    """A step that all groups have answered; times are of ``time.perf_counter``.

    Attributes:
      begun: when the driver sent the step to the groups.
      ended: when the last group had replied, and the step's callbacks were called.
      has_failed: whether the step, or one of its callbacks, has failed.
      bytes_sent: the bytes of the messages between groups.
    """

    begun: float
    ended: float
    has_failed: bool
    bytes_sent: int


class StepListener(Protocol):
    """Listens to the steps of a function. Its methods are called in the thread that calls the step."""

    def add(self, end: StepEnd) -> None:
        """A step has ended. Called in any thread, which must not wait."""
        ...

    def check(self) -> None:
        """The next step is called: raises what could not be raised before. Nothing of that step runs then."""
        ...

    def hand_over(self) -> None:
        """The next step is under way: time to do with the ended ones what takes long. Must not raise."""
        ...


class MeshWithRecoveries(Protocol):
    """The part of a mesh of groups that a meter reads."""

    @property
    def recovery_seconds(self) -> Sequence[float]: ...


@dataclasses.dataclass
class StepTotals:
    """The numbers of a function that only grow. They refer to no meter, and outlive it.

    Attributes:
      ended: the number of steps that have ended without an error.
      driver_seconds: seconds, after the first step, in which no step was under way because the driver had
        not called the next one.
    """

    name: str
    ended: int = 0
    failed: int = 0
    driver_seconds: float = 0.0

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(
            self.name,
            self.ended + other.ended,
            self.failed + other.failed,
            self.driver_seconds + other.driver_seconds,
        )


class StepMeter:
    """Counts all steps of a function, for any shapes. Thread-safe.

    Args:
      mesh: the groups; it is not kept alive.

    Attributes:
      last_end: when the last step ended, of ``time.perf_counter``; 0 before that.
      memory: the memory of each group at the end of its last measured step. Each measurement is a new object.
    """

    def __init__(self, name: str, mesh: MeshWithRecoveries):
        self.name = name
        self._mesh = weakref.ref(mesh)
        self._lock = threading.RLock()  # the handler of a signal may close metrics at any point
        self._listeners: tuple[StepListener, ...] = ()
        self.totals = StepTotals(name)
        self.last_end = 0.0
        self.memory: Mapping[int, MemoryUse] = {}
        self._begun = 0
        self._recent: collections.deque[float] = collections.deque(maxlen=RECENT + 1)
        self._memory_asked = float("-inf")

    @classmethod
    def of(cls, fun: Callable, mesh: MeshWithRecoveries) -> StepMeter:
        return cls(getattr(fun, "__name__", type(fun).__name__), mesh)

    @property
    def recovery_seconds(self) -> tuple[float, ...]:
        """The duration of each recovery of the mesh so far; none after the mesh was dropped."""
        mesh = self._mesh()
        return () if mesh is None else tuple(mesh.recovery_seconds)

    @property
    def under_way(self) -> int:
        over = self.totals.ended + self.totals.failed  # read first: steps may begin and end meanwhile
        return self._begun - over

    @property
    def seconds_per_step(self) -> float | None:
        """Mean seconds between the ends of the last ``RECENT`` steps; ``None`` before two have ended."""
        recent = list(self._recent)
        return (recent[-1] - recent[0]) / (len(recent) - 1) if len(recent) > 1 else None

    def add_listener(self, listener: StepListener) -> None:
        with self._lock:
            self._listeners += (listener,)

    def remove_listener(self, listener: StepListener) -> None:
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

    def check(self) -> None:
        """Raises what a listener has to raise before the next step."""
        for listener in self._listeners:
            listener.check()

    def hand_over(self) -> None:
        """Lets listeners work, while the step that was called just now runs."""
        for listener in self._listeners:
            listener.hand_over()

    def begin(self, bytes_sent: Callable[[], int]) -> Callable[[bool], None]:
        """A step is under way. Returns the function to call once, when it has ended, with whether it failed.

        Args:
          bytes_sent: gives the bytes of the messages between groups; is called if somebody listens.
        """
        with self._lock:
            now = time.perf_counter()
            if self.last_end and not self.under_way:
                self.totals.driver_seconds += now - self.last_end
            self._begun += 1
        return functools.partial(self._end, now, bytes_sent() if self._listeners else 0)

    # It refers to no future: replies keep it.
    def _end(self, begun: float, bytes_sent: int, has_failed: bool) -> None:
        with self._lock:
            now = self.last_end = time.perf_counter()
            if has_failed:
                self.totals.failed += 1
            else:
                self.totals.ended += 1
                self._recent.append(now)
            for listener in self._listeners:
                listener.add(StepEnd(begun, now, has_failed, bytes_sent))

    def wait(self) -> None:
        begun = self._begun
        while self.totals.ended + self.totals.failed < begun:
            time.sleep(_POLL_SECONDS)

    def asks_for_memory(self) -> bool:
        now = time.perf_counter()
        if now < self._memory_asked + MEMORY_SECONDS:
            return False
        self._memory_asked = now
        return True

    def read_memory(self, replies: Mapping[int, Future[StepReply]]) -> None:
        for mpmd_idx, reply in replies.items():
            reply.add_done_callback(functools.partial(self._note_memory, mpmd_idx))

    def _note_memory(self, mpmd_idx: int, reply: Future[StepReply]) -> None:
        if reply.exception() is None and (memory := reply.result().memory) is not None:
            with self._lock:
                self.memory = {**self.memory, mpmd_idx: memory}


class StepMeters:
    """The meters of a mesh's functions, in the order of their first load. Thread-safe.

    Holds meters weakly. The steps of dropped functions are summed for each name, so that a program which
    creates and drops many functions uses no more memory for each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meters: dict[weakref.ref[StepMeter], StepTotals] = {}
        self._dropped: dict[str, StepTotals] = {}

    def add(self, meter: StepMeter) -> None:
        with self._lock:
            self._sum_dropped()
            self._meters.setdefault(weakref.ref(meter), meter.totals)

    def all(self) -> list[StepMeter]:
        with self._lock:
            return [meter for known in self._meters if (meter := known()) is not None]

    def totals(self) -> list[StepTotals]:
        """Returns the sum of all functions with the same name, one for each name, with dropped functions."""
        with self._lock:
            self._sum_dropped()
            sums = dict(self._dropped)
            for totals in self._meters.values():
                _add_to(sums, totals)
            return list(sums.values())

    def _sum_dropped(self) -> None:
        for known in [known for known in self._meters if known() is None]:
            _add_to(self._dropped, self._meters.pop(known))


def _add_to(sums: dict[str, StepTotals], totals: StepTotals) -> None:
    sums[totals.name] = sums.get(totals.name, StepTotals(totals.name)) + totals
