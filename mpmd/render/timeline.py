"""Draws one schedule, or one measured step, as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable

from mpmd.events import Event
from mpmd.render.chart import Chart
from mpmd.render.lanes import (
    Scale,
    draw_boxes,
    draw_memory,
    draw_numbers,
    label_lanes,
    label_time,
    times_per_em,
    underline_fused,
)
from mpmd.render.legend import ROW, draw_legend, kind_row, stage_rows
from mpmd.render.style import FAINT, axes_at, drawing, text_at
from mpmd.simulate import Simulation

LEFT, RIGHT, TOP, TICKS, GAP, BOTTOM = 0.9, 0.75, 0.98, 0.38, 0.36, 0.14
"""Inches: margins left, right and above the lanes, for the time axis, above the memory, and below."""


def draw_timeline(
    source: Simulation | Iterable[Event],
    path: str | os.PathLike[str],
    title: str | None = None,
    of_plan: bool = False,
) -> None:
    """Draws when each group does what, a lane per group and a box per task, and the memory of each group.

    The hue shows the stage, and the lightness the kind: forwards are light and backwards dark, so that they
    also differ in print, and weight gradients are hatched. A box has the number of its microbatch where there
    is room. Fused tasks are underlined; where only the time of the whole is known, it is divided in
    proportion to the times of its kinds of task elsewhere. The same input gives the same file, byte by byte.

    Args:
      source: a simulation, or the measured events of one step, which have no memory.
      path: the file to write. The extension decides the format: ``.svg``, ``.png``, or another one of
        matplotlib.
      title: the headline.
      of_plan: whether the simulation is of a plan with measured costs, in seconds and bytes. For a schedule,
        times have no unit, and memory is in microbatches of as many stages as a group has on average.

    Raises: ``ValueError`` when there is nothing to draw, ``ImportError`` without matplotlib.
    """
    chart = Chart.of(source, of_plan)
    groups = len(chart.groups)
    width = _width(chart)
    lanes = min(max(6.4 / groups, 0.085), 0.4) * groups
    memory = min(max(2.75 / groups, 0.03), 0.3) * groups if chart.has_memory else 0.0
    scale = Scale.of(chart, width, lanes)
    rows = [*stage_rows(chart, width), kind_row([chart], scale)]
    below = TOP + lanes + (GAP if chart.has_memory else 0.0)
    height = below + memory + TICKS + ROW * len(rows) + BOTTOM
    default = "Simulated step" if isinstance(source, Simulation) else "Measured step"
    held = "memory held" if chart.physical else "residuals held, in microbatches"
    with drawing(path, LEFT + width + RIGHT, height) as figure:
        text_at(figure, LEFT, 0.36, title or default, fontsize=13, fontweight="bold")
        text_at(figure, LEFT, 0.61, f"{chart.size}:  {chart.figures}", color=FAINT)
        lowest = above = axes_at(figure, LEFT, TOP, width, lanes)
        draw_boxes(above, chart, scale)
        draw_numbers(above, chart, scale)
        if scale.thick:
            underline_fused(above, chart, scale)
        label_lanes(above, chart, scale, "busy", [f"{busy:.0%}" for busy in chart.busy])
        if chart.has_memory:
            above.set_xticks([])
            text_at(figure, LEFT, below - 0.07, held, fontsize=8.5, color=FAINT)
            lowest = axes_at(figure, LEFT, below, width, memory)
            scale = Scale.of(chart, width, memory)
            draw_memory(lowest, chart, scale)
            label_lanes(lowest, chart, scale, "peak", [chart.memory_text(peak) for peak in chart.peaks])
        label_time(lowest, *chart.unit)
        draw_legend(figure, rows, LEFT, BOTTOM)


def _width(chart: Chart) -> float:
    """The width of the lanes, in inches: enough to read the numbers, unless there are too many."""
    tightest = min(times_per_em(chart).values(), default=chart.makespan)
    needed = 5.5 / 72 * chart.makespan / tightest
    return max(7.4, needed) if needed <= 14.5 else 11.0
