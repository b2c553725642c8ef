"""Draws several schedules on one page, with the same scales of time and memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpmd.render.chart import Chart
from mpmd.render.lanes import Scale, draw_boxes, label_time
from mpmd.render.legend import ROW, draw_legend, kind_row
from mpmd.render.style import FAINT, LIMIT, MEMORY, OVER, RULE, axes_at, drawing, text_at
from mpmd.simulate import Simulation
from mpmd.validation import number_fault, path_fault, raise_faults, str_fault, type_fault

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEFT, WIDTH, BETWEEN, BARS, RIGHT = 0.4, 8.2, 0.35, 1.5, 0.4
"""Inches, from left to right: margin, lanes, space, bars of memory, margin."""

TOP, HEAD, GAP, TICKS, BOTTOM = 0.92, 0.26, 0.24, 0.38, 0.14
"""Inches, from the top: title, headline of a schedule, space below it, time axis, margin."""


def draw_comparison(
    simulations: Mapping[str, Simulation],
    path: str | os.PathLike[str],
    title: str = "Schedules",
    memory_limit: float | None = None,
) -> None:
    """Draws the tasks of each group under each schedule, as ``draw_timeline`` does, and its peak memory.

    Memory is in microbatches of as many stages as a group has on average. The times of several schedules have
    to be for the same model: a stage that is half as large takes half the time.

    Args:
      simulations: the simulations by name, in the order of the page.
      path: the file to write, as in ``draw_timeline``.
      title: the headline.
      memory_limit: a limit to mark in the bars of memory, in their unit.

    Raises: ``TypeError`` for other types, ``ValueError`` without simulations, ``ImportError`` without
      matplotlib.
    """
    raise_faults(
        type_fault("simulations", simulations, Mapping, "a dict with the Simulation of each name"),
        path_fault("path", path),
        str_fault("title", title),
        number_fault("memory_limit", memory_limit, above=0, optional=True),
    )
    raise_faults(
        *(
            type_fault(f"simulations[{name!r}]", simulation, Simulation, "a Simulation")
            for name, simulation in simulations.items()
        )
    )
    charts = {name: Chart.of(simulation) for name, simulation in simulations.items()}
    if not charts:
        raise ValueError("there are no schedules to compare")
    makespan = max(chart.makespan for chart in charts.values())
    top = 1.08 * max([*(max(chart.peaks) for chart in charts.values()), memory_limit or 0.0]) or 1.0
    tallest = min(max(12 / len(charts), 0.75), 1.2)
    heights = [
        min(max(tallest / len(chart.groups), 0.012), 0.16) * len(chart.groups) for chart in charts.values()
    ]
    rows = [kind_row(list(charts.values()))]
    height = TOP + sum(heights) + (HEAD + GAP) * len(charts) - GAP + TICKS + ROW * len(rows) + BOTTOM
    with drawing(path, LEFT + WIDTH + BETWEEN + BARS + RIGHT, height) as figure:
        text_at(figure, LEFT, 0.36, title, fontsize=13, fontweight="bold")
        text_at(figure, LEFT, 0.61, "one lane per group; the hue is the stage's", color=FAINT)
        limit = "" if memory_limit is None else f"; limit {memory_limit:.4g}"
        text_at(figure, LEFT + WIDTH + BETWEEN, 0.61, f"peak memory{limit}", color=FAINT)
        below = TOP
        for (name, chart), lanes in zip(charts.items(), heights, strict=True):
            text_at(figure, LEFT, below + 0.15, name, fontsize=9.5, fontweight="bold")
            text_at(figure, LEFT + WIDTH, below + 0.15, chart.figures, ha="right", fontsize=8.5)
            width = WIDTH * chart.makespan / makespan
            axes = axes_at(figure, LEFT, below + HEAD, width, lanes)
            draw_boxes(axes, chart, Scale.of(chart, width, lanes))
            axes.set(xticks=[], yticks=[])
            bars = axes_at(figure, LEFT + WIDTH + BETWEEN, below + HEAD, BARS, lanes)
            _draw_bars(bars, chart, top, memory_limit)
            below += HEAD + lanes + GAP
        ruler = axes_at(figure, LEFT, below - GAP, WIDTH, 0.01)
        ruler.set(xlim=(0, makespan), yticks=[])
        label_time(ruler)
        draw_legend(figure, rows, LEFT, BOTTOM)


def _draw_bars(axes: Axes, chart: Chart, top: float, limit: float | None) -> None:
    axes.set(xlim=(0, top), ylim=(len(chart.groups) - 0.5, -0.5), xticks=[], yticks=[])
    over = [limit is not None and peak > limit for peak in chart.peaks]
    colours = [OVER if beyond else MEMORY for beyond in over]
    thick = len(chart.groups) <= 24
    axes.barh(
        range(len(chart.groups)), chart.peaks, height=0.78 if thick else 1.0, color=colours, antialiased=thick
    )
    axes.axvline(0, color=RULE, linewidth=0.8)
    if limit is not None:
        axes.axvline(limit, color=LIMIT, linewidth=1.0, linestyle=(0, (4, 2)))
