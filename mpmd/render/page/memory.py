"""The memory of groups over time, as rows that many moments share."""

from __future__ import annotations

import bisect

from mpmd.attribution.memory import MemoryOverTime
from mpmd.memory import MemoryParts
from mpmd.render.page.palette import MEMORY
from mpmd.render.page.schema import GroupMemoryData, MemoryData
from mpmd.render.page.subject import Subject

MOST_MOMENTS = 100_000
"""The most moments of all groups together, beyond which a page shows the highest of several."""


def memory_data(subject: Subject) -> MemoryData | None:
    if not subject.memory:
        return None
    moments = sum(len(of_group.times) for of_group in subject.memory)
    together = -(-moments // MOST_MOMENTS)
    rows: dict[tuple[int, ...], int] = {}
    groups = [
        _group(subject, group, of_group, together, rows) for group, of_group in enumerate(subject.memory)
    ]
    note = f"Of each {together} moments, the one with the most bytes is shown." if together > 1 else None
    return MemoryData(
        kinds=list(MEMORY.values()),
        rows=list(map(list, rows)),
        groups=groups,
        note=note,
    )


def _group(
    subject: Subject, group: int, memory: MemoryOverTime, together: int, rows: dict[tuple[int, ...], int]
) -> GroupMemoryData:
    totals = [parts.total for parts in memory.parts]
    spans = (range(i, min(i + together, len(totals))) for i in range(0, len(totals), together))
    shown = [max(span, key=totals.__getitem__) for span in spans]
    highest = max(shown, key=totals.__getitem__)
    times = [memory.times[i] for i in shown]
    return GroupMemoryData(
        steps=[time - before for time, before in zip(times, [0, *times[:-1]], strict=True)],
        row=[rows.setdefault(_row(memory.parts[i]), len(rows)) for i in shown],
        peak=shown.index(highest),
        task=_task_at(subject, group, memory.times[highest]),
    )


def _row(parts: MemoryParts) -> tuple[int, ...]:
    return tuple(getattr(parts, kind) or 0 for kind in MEMORY)


def _task_at(subject: Subject, group: int, time: int) -> int:
    """Returns the number of the task that a group runs at a time; -1 for none."""
    measured, operations = subject.measured, subject.tasks[group]
    k = bisect.bisect_right(operations, time, key=measured.starts.__getitem__) - 1
    if k < 0 or measured.end(operations[k]) < time:
        return -1
    return subject.number(operations[k])
