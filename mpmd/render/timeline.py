"""Draws one schedule, or one measured step, as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mpmd.ir.events import Event
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
from mpmd.validation import bool_fault, int_fault, path_fault, raise_faults, str_fault, type_fault

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT, RIGHT, TOP, TICKS, GAP, HEAD, BOTTOM = 0.9, 0.75, 0.98, 0.38, 0.36, 0.6, 0.14
"""Inches: margins left, right and above the lanes, for the time axis, above the memory, for the headline of
the ideal, and below."""


def draw_timeline(
    source: Simulation | Iterable[Event],
    path: str | os.PathLike[str],
    title: str | None = None,
    of_plan: bool = False,
    ideal: Simulation | None = None,
    slices: int = 1,
) -> None:
    """Draws the tasks of each group over time, a lane per group and a box per task, and its memory.

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
      ideal: a simulation of the same plan, in seconds, that is drawn below in the same scale of time:
        ``simulate(step.plan, Costs.measured(events))`` is the step without any overhead between tasks.
      slices: the number of slices of each microbatch in a schedule's lists; hues show them, too.

    Raises: ``TypeError`` for other types, ``ValueError`` when there is nothing to draw, ``ImportError``
      without matplotlib.
    """
    raise_faults(
        path_fault("path", path),
        str_fault("title", title, optional=True),
        bool_fault("of_plan", of_plan),
        type_fault("ideal", ideal, Simulation, "a Simulation", optional=True),
        int_fault("slices", slices),
    )
    chart = Chart.of(source, of_plan, slices)
    below = None if ideal is None else Chart.of(ideal, of_plan=True)
    longest = max(chart.makespan, below.makespan if below else 0.0)
    width = _width(chart) * longest / chart.makespan
    own_width = width * chart.makespan / longest
    lanes = min(max(6.4 / len(chart.groups), 0.085), 0.4) * len(chart.groups)
    memory = _memory_height(chart)
    scale = Scale.of(chart, own_width, lanes)
    rows = [*stage_rows(chart, width), kind_row([chart], scale)]
    end = TOP + lanes + memory + TICKS
    height = end + (HEAD + lanes + TICKS if below else 0.0) + ROW * len(rows) + BOTTOM
    default = "Simulated step" if isinstance(source, Simulation) else "Measured step"
    with drawing(path, LEFT + width + RIGHT, height) as figure:
        text_at(figure, LEFT, 0.36, title or default, fontsize=13, fontweight="bold")
        figures = f"{chart.size};  measured:  {chart.figures}" if below else f"{chart.size}:  {chart.figures}"
        text_at(figure, LEFT, 0.61, figures, color=FAINT)
        lowest = _draw_lanes(figure, chart, scale, TOP, own_width, lanes)
        if memory:
            lowest.set_xticks([])
            lowest = _draw_memory(figure, chart, TOP + lanes + GAP, own_width, memory - GAP)
        label_time(lowest, *chart.unit)
        if below:
            headline = f"simulated, with these times of tasks and nothing between them:  {below.figures}"
            text_at(figure, LEFT, end + HEAD - 0.37, headline, color=FAINT)
            below_width = width * below.makespan / longest
            scale = Scale.of(below, below_width, lanes)
            label_time(_draw_lanes(figure, below, scale, end + HEAD, below_width, lanes), *chart.unit)
        draw_legend(figure, rows, LEFT, BOTTOM)


def _draw_lanes(figure: Figure, chart: Chart, scale: Scale, top: float, width: float, height: float) -> Axes:
    axes = axes_at(figure, LEFT, top, width, height)
    draw_boxes(axes, chart, scale)
    draw_numbers(axes, chart, scale)
    if scale.thick:
        underline_fused(axes, chart, scale)
    label_lanes(axes, chart, scale, "busy", [f"{busy:.0%}" for busy in chart.busy])
    return axes


def _memory_height(chart: Chart) -> float:
    groups = len(chart.groups)
    return GAP + min(max(2.75 / groups, 0.03), 0.3) * groups if any(chart.peaks) else 0.0


def _draw_memory(figure: Figure, chart: Chart, top: float, width: float, height: float) -> Axes:
    held = "memory held" if chart.physical else "residuals held, in microbatches"
    text_at(figure, LEFT, top - 0.07, held, fontsize=8.5, color=FAINT)
    axes = axes_at(figure, LEFT, top, width, height)
    draw_memory(axes, chart, scale := Scale.of(chart, width, height))
    label_lanes(axes, chart, scale, "peak", [chart.memory_text(peak) for peak in chart.peaks])
    return axes


def _width(chart: Chart) -> float:
    """Returns the inches across lanes that leave room to read the numbers, unless there are too many."""
    tightest = min(times_per_em(chart).values(), default=chart.makespan)
    needed = 5.5 / 72 * chart.makespan / tightest
    return max(7.4, needed) if needed <= 14.5 else 11.0
