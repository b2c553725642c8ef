"""The legends of pictures: the meaning of colours and patterns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpmd.ir.slices import SliceNumbers
from mpmd.render.chart import Chart
from mpmd.render.lanes import Scale, stage_colours
from mpmd.render.style import FUSED, INK, KINDS, LANE, OTHER, WAITING, Colour, oklch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW = 0.27
"""The height of a row, in inches."""

LegendEntry = tuple[str, Any]
"""Text, and the style of its patch or the colours of its strip of patches."""


def stage_rows(chart: Chart, width: float) -> list[list[LegendEntry]]:
    stages, colours = chart.stages, stage_colours(chart)
    present = {box.kind for box in chart.boxes}
    kinds = [kind for kind in KINDS if kind in present][:2]
    entries: list[LegendEntry] = []
    for nth in range(max(map(len, stages))):
        lanes = [lane for lane, of_lane in enumerate(stages) if len(of_lane) > nth]
        # An entry has room for a few patches, from the first lane to the last.
        shown = sorted({lanes[round(i * (len(lanes) - 1) / 3)] for i in range(4)})
        strip = [colours[lane, stages[lane][nth]][kind] for kind in kinds for lane in shown]
        entries.append((_numbers_text([stages[lane][nth] for lane in lanes], chart.numbers), strip))
    per_row = max(1, int(width / 1.8))
    return [entries[first : first + per_row] for first in range(0, len(entries), per_row)]


def _numbers_text(numbers: list[int], of_slices: SliceNumbers) -> str:
    slices = {of_slices.slice_of(number) for number in numbers}
    if of_slices.slices > 1 and len(slices) == 1:
        return f"{_stages_text([of_slices.stage_of(number) for number in numbers])}, slice {slices.pop()}"
    return _stages_text(numbers)


def _stages_text(stages: list[int]) -> str:
    first, last = stages[0], stages[-1]
    if len(stages) == 1:
        return f"stage {first}"
    if stages in (list(range(first, last + 1)), list(range(first, last - 1, -1))):
        return f"stages {first} to {last}"
    return f"stages {', '.join(map(str, stages[:3]))}" + (", ..." if len(stages) > 3 else "")


def kind_row(charts: Sequence[Chart], scale: Scale | None = None) -> list[LegendEntry]:
    """Entries for the kinds of boxes, in grey; without a scale, the charts have no details of tasks."""
    boxes = [box for chart in charts for box in chart.boxes]
    present = {box.kind for box in boxes}
    entries: list[LegendEntry] = []
    for kind, (text, lightness, _) in KINDS.items():
        if kind in present:
            hatch = {"hatch": "////"} if kind == "bwdW" and scale and scale.hatched else {}
            entries.append((text, {"facecolor": oklch(lightness, 0.0, 0.0), "edgecolor": "white", **hatch}))
    if any(not box.task and not box.waits for box in boxes):
        entries.append(("outside the loop", {"facecolor": OTHER}))
    if any(box.waits for box in boxes):
        entries.append(("waiting", WAITING))
    entries.append(("idle", {"facecolor": LANE}))
    if scale and scale.thick and any(chart.fused for chart in charts):
        entries.append(("fused", FUSED))
    return entries


def draw_legend(figure: Figure, rows: Sequence[Sequence[LegendEntry]], left: float, bottom: float) -> None:
    """Draws the rows upwards from ``bottom`` inches above the figure, each as a matplotlib legend."""
    from matplotlib.legend_handler import HandlerTuple

    across, down = figure.get_size_inches()
    for above, row in enumerate(reversed(rows)):
        figure.legend(
            [_handle(style) for _, style in row],
            [text for text, _ in row],
            ncols=len(row),
            loc="lower left",
            bbox_to_anchor=(left / across, (bottom + ROW * above) / down),
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
            frameon=False,
            fontsize=8.5,
            labelcolor=INK,
            borderaxespad=0,
            borderpad=0,
            columnspacing=1.8,
            handlelength=3.0,
            handletextpad=0.6,
        )


def _handle(style: dict[str, Any] | list[Colour]) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if style is FUSED:
        return Line2D([], [], **style)
    if isinstance(style, dict):
        return Patch(**{"linewidth": 0, **style})
    return tuple(Patch(facecolor=colour, linewidth=0) for colour in style)
