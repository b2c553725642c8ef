"""One schedule or one measured step as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable

from mpmd.render.chart import Chart
from mpmd.render.lanes import (
    Scale,
    draw_boxes,
    draw_memory,
    draw_numbers,
    label_lanes,
    label_time,
    rooms,
    underline_fused,
)
from mpmd.render.legend import ROW, draw_legend, kind_row, stage_rows
from mpmd.render.style import FAINT, axes_at, drawing, text_at
from mpmd.simulate import Simulation
from mpmd.timeline import Event

LEFT, RIGHT, TOP, TICKS, GAP, BOTTOM = 0.9, 0.75, 0.98, 0.38, 0.36, 0.14
"""Inches: margins left, right and above the lanes, for the time axis, above the memory, and below."""


def draw_timeline(
    source: Simulation | Iterable[Event],
    path: str | os.PathLike[str],
    title: str | None = None,
    of_plan: bool = False,
) -> None:
    """Draws what each group does when, a lane per group and a box per task, and below it what each holds.

    The hue is that of the stage, the lightness that of the kind: forwards are light and backwards dark, so
    that they differ in print too, and weight gradients are hatched. A box has its microbatch's number where
    there is room. Fused tasks are underlined; where only the whole is known, it is divided in proportion to
    what its kinds of task take elsewhere. The same input gives the same file, byte by byte.

    Args:
      source: a simulation, or what was measured in one step; of the latter, no memory is known.
      path: the file to write; its extension says the format: ``.svg``, ``.png``, or another that matplotlib
        knows.
      title: the headline.
      of_plan: whether the simulation is of a plan, with costs that were measured: in seconds and bytes. Of a
        schedule, times have no unit, and memory is in microbatches of as many stages as a group has on
        average.

    Raises: ``ValueError`` when there is nothing to draw, ``ImportError`` without matplotlib.
    """
    chart = Chart.of(source, of_plan)
    groups = len(chart.groups)
    width = _width(chart)
    lanes = min(max(6.4 / groups, 0.085), 0.4) * groups
    memory = min(max(2.75 / groups, 0.03), 0.3) * groups if chart.holds else 0.0
    scale = Scale.of(chart, width, lanes)
    rows = [*stage_rows(chart, width), kind_row([chart], scale)]
    below = TOP + lanes + (GAP if chart.holds else 0.0)
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
        if chart.holds:
            above.set_xticks([])
            text_at(figure, LEFT, below - 0.07, held, fontsize=8.5, color=FAINT)
            lowest = axes_at(figure, LEFT, below, width, memory)
            scale = Scale.of(chart, width, memory)
            draw_memory(lowest, chart, scale)
            label_lanes(lowest, chart, scale, "peak", [chart.amount(peak) for peak in chart.peaks])
        label_time(lowest, *chart.unit)
        draw_legend(figure, rows, LEFT, BOTTOM)


def _width(chart: Chart) -> float:
    """The width of the lanes, in inches: so wide that the numbers can be read, unless there are too many."""
    tightest = min(rooms(chart).values(), default=chart.makespan)
    needed = 5.5 / 72 * chart.makespan / tightest
    return max(7.4, needed) if needed <= 14.5 else 11.0
