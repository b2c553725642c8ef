"""Draws schedules as text."""

from __future__ import annotations

import math

from mpmd.render.chart import Chart
from mpmd.schedules import TaskLists
from mpmd.schedules.base import check_task_lists
from mpmd.schedules.faults import stages_need_names
from mpmd.schedules.text import short_text, slice_numbers
from mpmd.simulate import Costs, simulate
from mpmd.validation import raise_faults, type_fault

MOST_COLUMNS = 1_000_000


def schedule_grid(tasks: TaskLists, costs: Costs | None = None, slices: int = 1) -> str:
    """The lists of tasks as a grid of text: one row per group, one column per unit of time.

    A forward (``F``) takes one unit, a backward (``B``) two, its halves ``bwdA`` and ``bwdW`` (``A``, ``W``)
    one each, unless ``costs`` say otherwise; the number is the microbatch. The stage comes before the letter
    if some group runs a stage of another number than its own. If microbatches have ``slices``, the slice
    comes last (``F0s3``). ``+`` joins the tasks of a fused task, which run one after another, and ``.`` is
    idle time::

        0  F0 F1 .  .  B0--- B1---
        1  .  F0+B0--- F1+B1--- .

    Times that are not multiples of a common unit are rounded; a task that takes no time is not shown.

    Raises ``ValueError`` when the groups deadlock, and for times that take over ``MOST_COLUMNS`` columns.
    """
    check_task_lists("tasks", tasks)
    raise_faults(type_fault("costs", costs, Costs, "Costs", optional=True))
    if not any(tasks):
        return ""
    chart = Chart.of(simulate(tasks, costs, slices=slices))
    unit = _unit(chart)
    if (columns := chart.makespan / unit) > MOST_COLUMNS:
        raise ValueError(
            f"such times take a grid of {columns:.3g} columns, and the most are {MOST_COLUMNS}: "
            "draw the timeline as a picture"
        )
    spans = {box: range(_column(box.start, unit), _column(box.end, unit)) for box in chart.boxes}
    spans = {box: span for box, span in spans.items() if span}
    numbers = slice_numbers(tasks, slices)
    with_stage = stages_need_names(tasks, numbers)
    texts = {box: short_text(box.task, with_stage, numbers) for box in spans if box.task}
    width = max((math.ceil((len(text) + 1) / len(spans[box])) for box, text in texts.items()), default=1)
    width = max(width, 2)
    joined = {task for cells in tasks for cell in cells for task in cell.tasks[:-1]}
    lanes = [[".".ljust(width)] * _column(chart.makespan, unit) for _ in tasks]
    for box, text in texts.items():
        span = spans[box]
        text = text.ljust(len(span) * width - 1, "-" if len(span) > 1 else " ")
        ending = "+" if box.task in joined else " "
        lanes[box.lane][span.start : span.stop] = [text + ending, *[""] * (len(span) - 1)]
    label_width = len(str(len(tasks) - 1))
    rows = (f"{mpmd_idx:>{label_width}}  {''.join(lane)}".rstrip() for mpmd_idx, lane in enumerate(lanes))
    return "\n".join(rows)


def _column(time: float, unit: float) -> int:
    return math.floor(time / unit + 0.5)


def _unit(chart: Chart) -> float:
    """Returns the largest part of the shortest task that divides all times, or else the shortest task."""
    shortest = min((box.end - box.start for box in chart.boxes if box.end > box.start), default=1.0)
    times = {time / shortest for box in chart.boxes for time in (box.start, box.end)}
    for parts in range(1, 11):
        if all(abs(time * parts - round(time * parts)) < 1e-6 for time in times):
            return shortest / parts
    return shortest
