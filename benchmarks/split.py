"""The division of a step's time, by group."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from mpmd.ir.events import Event, Wait


@dataclasses.dataclass(frozen=True)
class Split:
    """The parts of a group's step, from its first task to that of its next step, in seconds.

    Attributes:
      tasks: how many executables it runs.
      running: in them.
      waiting: for messages to arrive, and taking them.
      handling: the rest from the first to the last of these: the executor, and sending.
      between: from there to the next step: the reply, the next request, its arguments.
    """

    mpmd_idx: int
    tasks: int
    running: float
    waiting: float
    handling: float
    between: float


def split(steps: Sequence[Sequence[Event]]) -> list[Split]:
    """The medians over steps that ran in a row, for each group; the last step has no next one."""
    groups = sorted({event.mpmd_idx for event in steps[0]})
    return [_split_of([[e for e in events if e.mpmd_idx == group] for events in steps]) for group in groups]


def _split_of(steps: Sequence[Sequence[Event]]) -> Split:
    parts = []
    for events, following in itertools.pairwise(steps):
        waiting = sum(event.duration for event in events if _is_wait(event))
        running = sum(event.duration for event in events if not _is_wait(event))
        handling = events[-1].end - events[0].start - running - waiting
        parts.append((running, waiting, handling, following[0].start - events[-1].end))
    tasks = sum(not _is_wait(event) for event in steps[0])
    return Split(steps[0][0].mpmd_idx, tasks, *map(statistics.median, zip(*parts, strict=True)))


def _is_wait(event: Event) -> bool:
    return isinstance(event.activity, Wait)
