"""The changes from one measured step to another, by cause and by type of task."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.attribution.texts import time_text
from mpmd.render.page.palette import TASKS
from mpmd.render.page.profile_data import parts_of
from mpmd.render.page.schema import Amount, PageTable, Section
from mpmd.render.page.subject import Subject
from mpmd.render.page.tables import key_of, types_data

LEAST_CHANGE = 0.005
"""The part of the step before below which a change has no sentence."""


def changes_data(before: Subject, after: Subject) -> Section:
    old, new = parts_of(before), parts_of(after)
    counts = len(before.tasks) or 1, len(after.tasks) or 1
    parts = [
        (part, part["total"] / counts[0], other["total"] / counts[1])
        for part, other in zip(old, new, strict=True)
        if part["total"] or other["total"]
    ]
    return Section(
        id="changed",
        title="What changed",
        notes=_sentences(before, after, parts),
        tables=[_parts_table(parts), _types_table(before, after)],
    )


_ChangedPart = tuple[Amount, float, float]
"""A part of the step, with its mean time of a group before and after."""


def _parts_table(parts: Sequence[_ChangedPart]) -> PageTable:
    rows = [(key_of(part), before, after, after - before) for part, before, after in parts]
    _, *sums = (sum(column) if place else 0 for place, column in enumerate(zip(*rows, strict=True)))
    return PageTable(
        "Mean time of a group: its tasks, and its idle time by cause; the parts add up to the step",
        {"Part": "key", "Before": "time", "After": "time", "Change": "time_change"},
        rows,
        foot=("Step", *sums),
    )


def _types_table(before: Subject, after: Subject) -> PageTable:
    olds, news = _by_name(before), _by_name(after)
    rows = []
    for name in {**olds, **news}:
        (old, old_sum), (new, new_sum) = olds.get(name, (None, 0)), news.get(name, (None, 0))
        rows.append((*name, old, new, new / old - 1 if old and new else None, new_sum - old_sum))
    return PageTable(
        "Median times of tasks, the largest change of the sum first",
        {"Task": "text", "Group": "count", "Before": "time", "After": "time", "Change": "share_change"}
        | {"Change of the sum": "time_change"},
        sorted(rows, key=lambda row: -abs(row[-1])),
    )


def _by_name(subject: Subject) -> dict[tuple[str, int], tuple[int, int]]:
    return {(each["label"], each["group"]): (each["median"], each["sum"]) for each in types_data(subject)}


def _sentences(before: Subject, after: Subject, parts: Sequence[_ChangedPart]) -> list[str]:
    old, new = before.measured.returned, after.measured.returned
    share = f"{abs(new - old) / (old or 1):.1%}"
    if share == "0.0%":
        sentences = [f"The step takes {time_text(new)}, as long as before."]
    else:
        direction = "more" if new > old else "less"
        sentences = [f"The step takes {time_text(new)} instead of {time_text(old)}: {share} {direction}."]
    for part, earlier, later in sorted(parts, key=lambda part: -abs(part[2] - part[1]))[:3]:
        if abs(change := later - earlier) >= LEAST_CHANGE * old:
            direction = "more" if change > 0 else "less"
            label = part["label"]
            name = label if label == TASKS["label"] else f"Idle time, {label.lower()}"
            sentences.append(f"{name}: {time_text(abs(change))} {direction} per group.")
    if len(before.tasks) != len(after.tasks):
        sizes = f"{len(before.tasks)} groups before and {len(after.tasks)} after"
        sentences.append(f"The steps have {sizes}; times are means over the groups of each.")
    return sentences
