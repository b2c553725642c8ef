"""Draws a chart into axes: x is the time, and y counts the lanes downwards."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpmd.ir.plan import TaskKind
from mpmd.render.chart import Box, Chart
from mpmd.render.style import (
    FAINT,
    FUSED,
    INK,
    KINDS,
    LANE,
    MEMORY,
    MEMORY_EDGE,
    OTHER,
    RULE,
    WAITING,
    Colour,
    colour_of,
    oklch,
)
from mpmd.util.grouping import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALLEST, LARGEST = 5.0, 9.0
"""The font sizes of the numbers of microbatches, in points."""

SAMPLES = 1000

Points = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a chart on paper, in points: a unit of its time, a lane, and its shortest task."""

    time: float
    lane: float
    shortest: float

    @staticmethod
    def of(chart: Chart, width: float, height: float) -> Scale:
        """The scale of lanes of a width and, all together, of a height in inches."""
        time = width * 72 / chart.makespan
        shortest = min((box.end - box.start for box in chart.boxes if box.task), default=0.0)
        return Scale(time, height * 72 / len(chart.groups), shortest * time)

    @property
    def thick(self) -> bool:
        """Whether lanes have room for lines and numbers."""
        return self.lane >= 12

    @property
    def hatched(self) -> bool:
        return self.thick and self.shortest >= 9

    @property
    def half_height(self) -> float:
        # Between thinner lanes, rounding to pixels would make the gaps differ.
        return 0.38 if self.thick else 0.46 if self.lane >= 3 else 0.5

    @property
    def edge_width(self) -> float:
        """White edges must not cover narrow tasks."""
        return min(0.6, 0.1 * self.shortest, 0.05 * self.lane) if min(self.shortest, self.lane) > 2 else 0.0


def draw_boxes(axes: Axes, chart: Chart, scale: Scale) -> None:
    _set_limits(axes, chart)
    whole = [_corners(0, chart.makespan, lane, scale.half_height) for lane in range(len(chart.groups))]
    _add_path(axes, whole, facecolor=LANE)
    for style, boxes in _styles(chart, scale):
        spans = [
            _corners(box.start, box.end, box.lane, 0.12 if box.waits else scale.half_height) for box in boxes
        ]
        _add_path(axes, spans, antialiased=scale.lane >= 3, **style)


def underline_fused(axes: Axes, chart: Chart, scale: Scale) -> None:
    from matplotlib.collections import LineCollection

    y, inset = 0.44, 1.0 / scale.time
    lines = [[(start + inset, lane + y), (end - inset, lane + y)] for lane, start, end in chart.fused]
    axes.add_collection(LineCollection(lines, **FUSED, capstyle="butt"), autolim=False)


def _set_limits(axes: Axes, chart: Chart) -> None:
    axes.set_xlim(0, chart.makespan)
    axes.set_ylim(len(chart.groups) - 0.5, -0.5)


def _corners(start: float, end: float, lane: int, half: float) -> Points:
    top, bottom = lane - half, lane + half
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _add_path(axes: Axes, spans: Sequence[Points], **style: Any) -> None:
    """Draws spans of one style as one path, which takes far fewer bytes in a file."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [corner for span in spans for corner in (*span, span[0])]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(spans)
    axes.add_artist(PathPatch(Path(corners, codes), **{"linewidth": 0, **style}))


def _styles(chart: Chart, scale: Scale) -> list[tuple[dict[str, Any], list[Box]]]:
    alike = grouped(((box.lane, *box.task.type), box) for box in chart.boxes if box.task)
    edges = {"edgecolor": "white", "linewidth": scale.edge_width}
    colours = stage_colours(chart)
    styles: list[tuple[dict[str, Any], list[Box]]] = [
        (WAITING, [box for box in chart.boxes if box.waits]),
        ({"facecolor": OTHER, **edges}, [box for box in chart.boxes if not box.task and not box.waits]),
    ]
    for (lane, kind, stage), boxes in alike.items():
        hatch = {"hatch": "////"} if kind == "bwdW" and scale.hatched else {}
        styles.append(({"facecolor": colours[lane, stage][kind], **edges, **hatch}, boxes))
    return [(style, boxes) for style, boxes in styles if boxes]


def stage_colours(chart: Chart) -> dict[tuple[int, int], dict[TaskKind, Colour]]:
    most = max(map(len, chart.stages))
    last = max(1, len(chart.groups) - 1)
    return {
        (lane, stage): {kind: colour_of(kind, nth, most, lane / last) for kind in KINDS}
        for lane, stages in enumerate(chart.stages)
        for nth, stage in enumerate(stages)
    }


def time_per_em(box: Box) -> float:
    """The time that one em would have to span for the box's text to fill the box."""
    return (box.end - box.start) / (0.62 * len(box.text) + 0.35)


def times_per_em(chart: Chart) -> dict[TaskKind, float]:
    """For each kind the room in its boxes, except the shortest: a few measured ones are far shorter."""
    sorted_times = {
        kind: sorted(time_per_em(box) for box in chart.boxes if box.kind == kind) for kind in KINDS
    }
    return {kind: values[len(values) // 50] for kind, values in sorted_times.items() if values}


def draw_numbers(axes: Axes, chart: Chart, scale: Scale) -> None:
    """Draws the microbatches of all boxes of a kind or of none, and other text where it fits."""
    fitting = {
        kind: em * scale.time for kind, em in times_per_em(chart).items() if em * scale.time >= SMALLEST
    }
    size = min([LARGEST, 0.62 * scale.lane, *fitting.values()])
    if size < SMALLEST:
        return
    shown = [box for box in chart.boxes if (box.kind in fitting or not box.task) and not box.waits]
    shown = [box for box in shown if time_per_em(box) * scale.time >= size]
    colours = stage_colours(chart)
    for box in shown:
        style: dict[str, Any] = {"color": "white" if box.kind in ("bwd", "bwdA") else INK}
        if box.task and box.kind == "bwdW" and scale.hatched:  # without hatching behind it
            ground = colours[box.lane, box.task.stage]["bwdW"]
            style["bbox"] = {"facecolor": ground, "linewidth": 0, "pad": 0.8}
        x = (box.start + box.end) / 2
        axes.text(x, box.lane, box.text, ha="center", va="center_baseline", fontsize=size, **style)


def draw_memory(axes: Axes, chart: Chart, scale: Scale) -> None:
    _set_limits(axes, chart)
    if scale.lane < 7:
        _draw_shades(axes, chart)
        return
    top = max(chart.peaks) or 1.0
    for lane, steps in enumerate(chart.memory):
        # Of several changes at one time only the last one can be seen.
        held = dict(steps)
        times = [*held, chart.makespan]
        base = lane + 0.42
        heights = [base - 0.84 * amount / top for amount in [*held.values(), steps[-1][1]]]
        axes.fill_between(times, heights, base, step="post", facecolor=MEMORY, linewidth=0)
        axes.step(times, heights, where="post", color=MEMORY_EDGE, linewidth=0.8)
        axes.axhline(base, color=RULE, linewidth=0.5, zorder=0)


def _draw_shades(axes: Axes, chart: Chart) -> None:
    top = max(chart.peaks) or 1.0
    shades = [oklch(0.95 - 0.005 * i, 0.006 + 0.0004 * i, 262.0) for i in range(101)]
    samples = [(i + 0.5) * chart.makespan / SAMPLES for i in range(SAMPLES)]
    rows = []
    for steps in chart.memory:
        times = [time for time, _ in steps]
        amounts = (steps[bisect.bisect_right(times, sample) - 1][1] for sample in samples)
        rows.append([shades[round(100 * amount / top)] for amount in amounts])
    whole = (0, chart.makespan, len(rows) - 0.5, -0.5)
    axes.imshow(rows, extent=whole, aspect="auto", interpolation="nearest")


def label_lanes(axes: Axes, chart: Chart, scale: Scale, head: str, texts: Sequence[str]) -> None:
    """Writes names left and a column of texts right of the lanes; of thin lanes, only every few have them."""
    every = 1 << max(0, math.ceil(math.log2(12 / scale.lane)))
    named = range(0, len(chart.groups), every)
    axes.set_yticks(named, [f"group {chart.groups[lane]}" for lane in named])
    axes.tick_params(axis="y", labelsize=8.5, labelcolor=INK, pad=7)
    lanes = axes.get_yaxis_transform()
    for lane in named:
        _beside(axes, texts[lane], at=(1, lane), within=lanes, colour=INK, va="center_baseline")
    _beside(axes, head, at=(1, 1), within=axes.transAxes, up=5, colour=FAINT, va="baseline")


def label_time(axes: Axes, scale: float = 1.0, unit: str = "") -> None:
    axes.xaxis.set_major_formatter(lambda time, _: f"{time * scale:g}")
    axes.tick_params(axis="x", length=3, color=FAINT)
    _beside(axes, unit or "time", at=(1, 0), within=axes.transAxes, up=-6.5, colour=FAINT, va="top")


def _beside(
    axes: Axes, text: str, *, at: tuple[float, float], within: Any, colour: str, va: str, up: float = 0.0
) -> None:
    """Writes a text right of the point ``at`` of the transform ``within``, ``up`` points above it."""
    axes.annotate(
        text, at, (7, up), xycoords=within, textcoords="offset points", va=va, fontsize=8.5, color=colour
    )
