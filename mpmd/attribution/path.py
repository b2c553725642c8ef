"""The critical path: what the end of the step came after, back to the driver's call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from mpmd.attribution.links import ParentLink
from mpmd.attribution.measured import Measured

SegmentKind = Literal["task", "message", "handling", "late_begin", "driver"]


class Segment(NamedTuple):
    """A part of the critical path, in nanoseconds since the call.

    Attributes:
      kind: a task, or the cause of the time between two tasks.
      operation: the task, or the operation that comes after.
      message: the number of the message in flight; -1 for other segments.
    """

    kind: SegmentKind
    operation: int
    start: int
    end: int
    message: int = -1


def critical_path(measured: Measured, links: Sequence[ParentLink]) -> tuple[Segment, ...]:
    return tuple(segment for segment in _backwards(measured, links) if segment.end > segment.start)[::-1]


def _backwards(measured: Measured, links: Sequence[ParentLink]) -> Iterator[Segment]:
    operation = measured.last_reply
    until = measured.end(operation)
    yield Segment("driver", operation, until, measured.returned)
    while operation >= 0:
        # Clocks that are wrong may have a parent end after its child began.
        link, start = links[operation], min(measured.starts[operation], until)
        bound = min(link.start, start)
        came = min(bound + link.message, start)
        yield Segment("task", operation, start, until)
        yield Segment("handling", operation, came, start)
        yield Segment("message", operation, bound, came, link.awaited)
        if link.parent < 0:
            received = min(link.driver, bound)
            yield Segment("late_begin", operation, received, bound)
            yield Segment("driver", operation, 0, received)
        until, operation = bound, link.parent
