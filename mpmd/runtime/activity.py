"""The current activity of a group, and since when."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator
from typing import NamedTuple

IDLE = "idle"


class ActivityKind(enum.Enum):
    """A task, or a part of loading a program, which nothing can interrupt; or else, such as a wait."""

    TASK = "task"
    LOAD = "load"
    OTHER = "other"


class Loading(str):
    kind = ActivityKind.LOAD


class Computing(str):
    kind = ActivityKind.TASK


FINISHING = Computing("waiting for the devices at the end")


class Doing(NamedTuple):
    """The activity of a process of a group at one moment.

    Attributes:
      what: such as ``running bwd_1__3``, ``waiting for message 2 of group 0`` or ``compiling fwd_1``.
      step: the number of the step that it belongs to; ``None`` outside of steps.
      kind: by which it has a limit, if the user has set one.
      seconds: for how long.
    """

    what: str
    step: int | None
    kind: ActivityKind
    seconds: float

    def __str__(self) -> str:
        of_step = "" if self.step is None else f" in step {self.step}"
        return f"{self.what}{of_step} for {self.seconds:.1f} s"


class Activity:
    """The current activity of a group. Its thread writes, any thread reads.

    Attributes:
      now: the operation, as an object whose text names it, and which may have a ``kind``; and its begin, a
        time of ``time.perf_counter``. Operations of a step assign it, which costs next to nothing.
      step: the number of the step under way, as users count the steps of the mesh; ``None`` between steps.
    """

    __slots__ = ("now", "step")

    def __init__(self) -> None:
        self.now: tuple[object, float] = (IDLE, time.perf_counter())
        self.step: int | None = None

    @contextlib.contextmanager
    def during(self, what: str, step: int | None = None) -> Iterator[None]:
        before, step_before = self.now[0], self.step
        self.now = (what, time.perf_counter())
        if step is not None:
            self.step = step
        try:
            yield
        finally:
            self.step = step_before
            self.now = (before, time.perf_counter())

    def read(self) -> Doing:
        """The current activity. May be called from any thread."""
        (what, since), step = self.now, self.step
        return Doing(str(what), step, getattr(what, "kind", ActivityKind.OTHER), time.perf_counter() - since)
