"""Draws schedules as text, and a measured step as a picture or as a trace for Perfetto."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mpmd.ir import Cell, Task, TaskKind, parse_cell
from mpmd.schedules.check import Value, makes, needs, total_order
from mpmd.timeline import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["chrome_trace", "schedule_grid", "timeline_png"]

UNITS: dict[TaskKind, int] = {"fwd": 1, "bwd": 2, "bwdA": 1, "bwdW": 1}
"""How long a task takes in a schedule's grid, where messages take no time."""

_LETTERS: dict[TaskKind, str] = {"fwd": "F", "bwd": "B", "bwdA": "A", "bwdW": "W"}


def schedule_grid(tasks: Sequence[Sequence[Cell]]) -> str:
    """The lists of tasks as a text grid: one row per group, one column per unit of time.

    A forward (``F``) takes one unit, a backward (``B``) two, its halves ``bwdA`` and ``bwdW`` (``A``, ``W``)
    one each; the number is the microbatch. A stage comes before the letter where groups have several,
    ``+`` joins fused tasks, which run one after another, and ``.`` is idle::

        0  F0 F1 .  .  B0--- B1---
        1  .  F0+B0--- F1+B1--- .

    Raises ``ValueError`` when the groups get stuck.
    """
    times = _unit_times(tasks)
    several = any(len({task.stage for task in row}) > 1 for row in times)
    texts = {task: _short(task, several) for row in times for task in row}
    width = max(map(len, texts.values()), default=0) + 1
    makespan = max((end for row in times for _, end in row.values()), default=0)
    joined = {task for cells in tasks for cell in cells for task in cell.tasks[:-1]}
    label_width = len(str(len(tasks) - 1))
    rows = []
    for mpmd_idx, row in enumerate(times):
        columns = [".".ljust(width)] * makespan
        for task, (start, end) in row.items():
            text = texts[task].ljust((end - start) * width - 1, "-" if end - start > 1 else " ")
            columns[start:end] = [text + ("+" if task in joined else " "), *[""] * (end - start - 1)]
        rows.append(f"{mpmd_idx:>{label_width}}  {''.join(columns)}".rstrip())
    return "\n".join(rows)


def _short(task: Task, with_stage: bool) -> str:
    return f"{task.stage if with_stage else ''}{_LETTERS[task.kind]}{task.microbatch}"


def _unit_times(tasks: Sequence[Sequence[Cell]]) -> list[dict[Task, tuple[int, int]]]:
    """For each group when its tasks start and end, each as early as it can."""
    num_stages = max((t.stage for cells in tasks for cell in cells for t in cell.tasks), default=0) + 1
    made: dict[Value | None, int] = {}
    free = [0] * len(tasks)
    times: list[dict[Task, tuple[int, int]]] = [{} for _ in tasks]
    for mpmd_idx, cell in total_order(tasks):
        for task in cell.tasks:
            start = max([free[mpmd_idx], *(made.get(value, 0) for value in needs(task, num_stages))])
            free[mpmd_idx] = made[makes(task)] = start + UNITS[task.kind]
            times[mpmd_idx][task] = (start, free[mpmd_idx])
    return times


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """The events in the Trace Event Format, which Perfetto and ``chrome://tracing`` open.

    One row per group; times are microseconds from the start of the earliest event. Write it with
    ``json.dump``.

    Source: Google, "Trace Event Format" (complete events, ``ph: X``, and metadata events, ``ph: M``).
    """
    events = sorted(events, key=lambda event: (event.mpmd_idx, event.start))
    origin = min((event.start for event in events), default=0.0)
    groups = sorted({event.mpmd_idx for event in events})
    names = [_metadata("thread_name", mpmd_idx, {"name": f"group {mpmd_idx}"}) for mpmd_idx in groups]
    order = [_metadata("thread_sort_index", mpmd_idx, {"sort_index": mpmd_idx}) for mpmd_idx in groups]
    slices = [_slice(event, origin) for event in events]
    return {"traceEvents": [*names, *order, *slices], "displayTimeUnit": "ms"}


def _metadata(name: str, mpmd_idx: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": 0, "tid": mpmd_idx, "args": args}


def _slice(event: Event, origin: float) -> dict[str, Any]:
    tasks = _tasks(event.label)
    return {
        "ph": "X",
        "name": event.label,
        "cat": "+".join(task.kind for task in tasks) or "other",
        "pid": 0,
        "tid": event.mpmd_idx,
        "ts": (event.start - origin) * 1e6,
        "dur": event.duration * 1e6,
        "args": {"stage": tasks[0].stage, "microbatch": tasks[0].microbatch} if tasks else {},
    }


def _tasks(label: str) -> tuple[Task, ...]:
    """The tasks of a label that is a schedule's cell; none for other text."""
    try:
        return parse_cell(label).tasks
    except ValueError:
        return ()


def timeline_png(events: Iterable[Event], path: str | os.PathLike[str], title: str = "Measured step") -> None:
    """Draws what each group did when: one lane per group, one box per task.

    The hue is the stage's, the lightness the kind's: forwards are light and backwards dark, so they differ
    in print too, and a ``bwdW`` is hatched. A box holds its microbatch's number where that fits. The tasks
    of a fused cell share its time in proportion to ``UNITS``, since only the whole is measured.

    Args:
      events: what was measured in one step.
      path: the file to write; its extension says the format: ``.png``, ``.svg``, or another that
        matplotlib knows.
      title: the headline.

    Raises: ``ValueError`` without events, ``ImportError`` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a timeline needs matplotlib: pip install 'mpmd[plot]'") from error
    boxes = _boxes(list(events))
    if not boxes:
        raise ValueError("there are no events to draw; was the step measured?")
    layout = _Layout.of(boxes)
    figure = Figure(figsize=(layout.width, layout.height), dpi=200, facecolor="white")
    axes = figure.add_axes(layout.axes)
    _draw_lanes(axes, boxes, layout)
    _draw_boxes(axes, boxes, layout)
    _draw_numbers(axes, boxes, layout)
    _draw_header(figure, boxes, layout, title)
    _draw_legend(figure, boxes, layout)
    figure.savefig(path)


@dataclasses.dataclass(frozen=True)
class _Box:
    """What is drawn for a task, or for other text if ``task`` is ``None``; seconds from the first event."""

    mpmd_idx: int
    task: Task | None
    label: str
    start: float
    end: float

    @property
    def kind(self) -> TaskKind | None:
        return self.task.kind if self.task else None

    @property
    def waits(self) -> bool:
        return self.task is None and self.label.startswith("wait")

    @property
    def busy(self) -> float:
        """Seconds of work."""
        return 0.0 if self.waits else self.end - self.start

    @property
    def text(self) -> str:
        return self.label if self.task is None else str(self.task.microbatch)


def _boxes(events: Sequence[Event]) -> list[_Box]:
    origin = min((event.start for event in events), default=0.0)
    boxes = []
    for event in events:
        tasks = _tasks(event.label) or (None,)
        units = [UNITS[task.kind] if task else 1 for task in tasks]
        start = event.start - origin
        for task, unit in zip(tasks, units, strict=True):
            end = start + event.duration * unit / sum(units)
            boxes.append(_Box(event.mpmd_idx, task, event.label, start, end))
            start = end
    return boxes


_INK, _FAINT = "#1f2430", "#6b7280"
_LANE_COLOUR, _OTHER_COLOUR = "#eef0f4", "#9aa1ad"
_WAITING: dict[str, Any] = {"facecolor": "none", "edgecolor": "#b8bec9", "linewidth": 0.0, "hatch": "//////"}
_LOOKS: dict[TaskKind, tuple[str, float, float]] = {
    "fwd": ("forward", 0.87, 0.075),
    "bwd": ("backward", 0.55, 0.14),
    "bwdA": ("backward, input gradient", 0.64, 0.14),
    "bwdW": ("backward, weight gradient", 0.70, 0.11),
}
"""What the legend calls a kind of task, and the lightness and chroma it is drawn with."""


@dataclasses.dataclass(frozen=True)
class _Layout:
    """What there is to draw, and the size of the figure in inches."""

    groups: tuple[int, ...]
    stages: tuple[int, ...]
    makespan: float
    """Seconds from the start of the first event to the end of the last."""
    width: float

    left, right, top, ticks, lane, legend_row = 0.95, 0.85, 0.95, 0.5, 0.46, 0.27

    @staticmethod
    def of(boxes: Sequence[_Box]) -> _Layout:
        groups = tuple(sorted({box.mpmd_idx for box in boxes}))
        stages = tuple(sorted({box.task.stage for box in boxes if box.task}))
        boxes_per_lane = max(sum(box.mpmd_idx == group for box in boxes) for group in groups)
        width = min(max(11.0, 0.24 * boxes_per_lane + 3), 26.0)
        return _Layout(groups, stages, max(box.end for box in boxes) or 1.0, width)

    @property
    def stages_per_row(self) -> int:
        """How many stages fit into a row of the legend."""
        return int((self.width - self.left) / 1.06)

    @property
    def height(self) -> float:
        rows = 1 + math.ceil(len(self.stages) / self.stages_per_row)
        return self.top + self.lane * len(self.groups) + self.ticks + self.legend_row * rows + 0.1

    @property
    def axes(self) -> tuple[float, float, float, float]:
        """Left, bottom, width and height of the axes, as fractions of the figure."""
        height = self.lane * len(self.groups)
        width = self.width - self.left - self.right
        bottom = 1 - (self.top + height) / self.height
        return self.left / self.width, bottom, width / self.width, height / self.height

    def points(self, seconds: float) -> float:
        """The width on paper of a span of time, in points."""
        return seconds / self.makespan * (self.width - self.left - self.right) * 72

    def y(self, box: _Box) -> int:
        """The middle of the box's lane."""
        return self.groups.index(box.mpmd_idx)

    def hue(self, box: _Box) -> float | None:
        """The hue of the box's stage, if it has one."""
        return self.hues[box.task.stage] if box.task else None

    @property
    def hues(self) -> dict[int, float]:
        """For each stage its hue in degrees: once round the circle, from blue by green and red to violet."""
        return {stage: 250.0 - 330.0 * i / len(self.stages) for i, stage in enumerate(self.stages)}


def _draw_lanes(axes: Axes, boxes: Sequence[_Box], layout: _Layout) -> None:
    scale, unit = _time_unit(layout.makespan)
    axes.set_xlim(0, layout.makespan)
    axes.set_ylim(len(layout.groups) - 0.5, -0.5)
    axes.set_yticks(range(len(layout.groups)), [f"group {group}" for group in layout.groups])
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * scale:g}")
    axes.tick_params(axis="y", length=0, labelsize=9.5, labelcolor=_INK, pad=7)
    axes.tick_params(axis="x", length=3, labelsize=8.5, labelcolor=_FAINT, color=_FAINT)
    axes.spines[:].set_visible(False)
    beside = axes.get_yaxis_transform()
    for y, group in enumerate(layout.groups):
        axes.broken_barh([(0, layout.makespan)], (y - 0.39, 0.78), facecolor=_LANE_COLOUR, zorder=0)
        busy = sum(box.busy for box in boxes if box.mpmd_idx == group) / layout.makespan
        axes.text(1.012, y, f"{busy:.0%}", transform=beside, va="center", fontsize=9.5, color=_INK)
    axes.text(1.012, -0.62, "busy", transform=beside, va="bottom", fontsize=8.5, color=_FAINT)
    axes.text(1.012, len(layout.groups) - 0.32, unit, transform=beside, va="top", fontsize=8.5, color=_FAINT)


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 2 else (1e3, "ms") if seconds >= 2e-3 else (1e6, "µs")


def _draw_boxes(axes: Axes, boxes: Sequence[_Box], layout: _Layout) -> None:
    for box in boxes:
        span, y = [(box.start, box.end - box.start)], layout.y(box)
        if box.waits:
            axes.broken_barh(span, (y - 0.12, 0.24), **_WAITING, zorder=1)
        else:
            axes.broken_barh(span, (y - 0.39, 0.78), **_style(box.kind, layout.hue(box)), zorder=2)


def _draw_numbers(axes: Axes, boxes: Sequence[_Box], layout: _Layout) -> None:
    """The microbatches' numbers, all as large as fits nearly all boxes, and none where it does not fit."""
    fitting = {box: layout.points(box.busy) / (0.62 * len(box.text) + 0.2) for box in boxes if not box.waits}
    of_tasks = sorted(size for box, size in fitting.items() if box.task) or [9.0]
    size = min(max(of_tasks[len(of_tasks) // 100], 4.5), 9.0)
    for box in [box for box in fitting if fitting[box] >= size]:
        colour, weight = (_INK, "normal") if box.kind == "fwd" else ("white", "bold")
        x, y = (box.start + box.end) / 2, layout.y(box) + 0.02
        text = axes.text(x, y, box.text, ha="center", va="center", size=size, color=colour, weight=weight)
        if box.kind == "bwdW":
            # Without a ground of its own the number would be lost in the hatching.
            ground = _style(box.kind, layout.hue(box))["facecolor"]
            text.set_bbox({"facecolor": ground, "edgecolor": "none", "pad": 0.12 * size})


def _draw_header(figure: Figure, boxes: Sequence[_Box], layout: _Layout, title: str) -> None:
    scale, unit = _time_unit(layout.makespan)
    idle = 1 - sum(box.busy for box in boxes) / (layout.makespan * len(layout.groups))
    facts = f"{len(layout.groups)} groups, {len(layout.stages)} stages, {layout.makespan * scale:.4g} {unit}"
    x = layout.left / layout.width
    figure.text(x, 1 - 0.36 / layout.height, title, fontsize=14, fontweight="bold", color=_INK)
    figure.text(x, 1 - 0.62 / layout.height, f"{facts}, {idle:.0%} idle", fontsize=9.5, color=_FAINT)


def _draw_legend(figure: Figure, boxes: Sequence[_Box], layout: _Layout) -> None:
    """Rows of stages, and below them a row of kinds, each a legend of its own so that rows fill first."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    stages: list[tuple[str, Any]] = [
        (f"stage {stage}", (Patch(**_style("fwd", hue)), Patch(**_style("bwd", hue))))
        for stage, hue in layout.hues.items()
    ]
    per_row = layout.stages_per_row
    rows = [stages[first : first + per_row] for first in range(0, len(stages), per_row)]
    rows.append([(text, Patch(**style)) for text, style in _kinds(boxes)])
    for above, row in enumerate(reversed(rows)):
        figure.legend(
            [handle for _, handle in row],
            [text for text, _ in row],
            ncols=len(row),
            loc="lower left",
            bbox_to_anchor=(layout.left / layout.width, (0.12 + layout.legend_row * above) / layout.height),
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
            frameon=False,
            fontsize=9,
            labelcolor=_INK,
            borderaxespad=0,
            borderpad=0,
            columnspacing=1.6,
            handlelength=1.8,
            handletextpad=0.6,
        )


def _kinds(boxes: Sequence[_Box]) -> list[tuple[str, dict[str, Any]]]:
    """The kinds that are drawn, what they are called and what they look like, in grey."""
    present = {box.task.kind for box in boxes if box.task}
    kinds = [(_LOOKS[kind][0], _style(kind, None)) for kind in _LOOKS if kind in present]
    if any(box.task is None and not box.waits for box in boxes):
        kinds.append(("outside the loop", _style(None, None)))
    if any(box.waits for box in boxes):
        kinds.append(("waiting", _WAITING))
    return [*kinds, ("idle", {"facecolor": _LANE_COLOUR})]


def _style(kind: TaskKind | None, hue: float | None) -> dict[str, Any]:
    """The look of a kind of task, in a stage's hue or in grey, or of other work."""
    style = {"facecolor": _OTHER_COLOUR, "edgecolor": "white", "linewidth": 0.6}
    if kind is None:
        return style
    _, lightness, chroma = _LOOKS[kind]
    colour = _oklch(lightness, 0.0, 0.0) if hue is None else _oklch(lightness, chroma, hue)
    return {**style, "facecolor": colour, **({"hatch": "////"} if kind == "bwdW" else {})}


def _oklch(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """The sRGB colour of a perceived lightness and chroma and a hue in degrees, as near as sRGB has it.

    Source: Ottosson, "A perceptual color space for image processing", 2020.
    """
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    red = 4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short
    green = -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short
    blue = -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short
    return _gamma(red), _gamma(green), _gamma(blue)


def _gamma(linear: float) -> float:
    linear = min(max(linear, 0.0), 1.0)
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
