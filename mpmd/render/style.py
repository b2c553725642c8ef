"""The style of pictures: colours of stages and kinds, and places on the page."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpmd.ir.plan import TaskKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

INK, FAINT, RULE = "#1f2430", "#6b7280", "#d3d7df"
LANE, OTHER = "#eceef2", "#9aa1ad"
MEMORY, MEMORY_EDGE, LIMIT, OVER = "#cdd3de", "#77839b", "#b3261e", "#e8b4ae"
FUSED: dict[str, Any] = {"color": INK, "linewidth": 1.3}
WAITING: dict[str, Any] = {"facecolor": "none", "edgecolor": "#b8bec9", "hatch": "//////"}

KINDS: dict[TaskKind, tuple[str, float, float]] = {
    "fwd": ("forward", 0.87, 0.075),
    "bwd": ("backward", 0.50, 0.13),
    "bwdA": ("input gradient", 0.55, 0.13),
    "bwdW": ("weight gradient", 0.73, 0.11),
}
"""The name of each kind of task in legends, and the lightness and chroma of its colour."""

FONTS = ["DejaVu Sans", "Verdana", "sans-serif"]
"""The first font comes with matplotlib; SVG viewers without it use the second one, which is about as wide."""


def colour_of(kind: TaskKind, nth: int, of: int, along: float) -> Colour:
    """The colour of a kind of task of the ``nth`` of the ``of`` stages of a group.

    The stages of one group differ in hue as much as possible; two stages are blue and orange, which nearly
    all people can tell apart. They also differ a little in lightness, most where some people see similar
    hues. From group to group the hue changes a little.

    Args:
      along: the place of the group among all groups, from 0 to 1.
    """
    _, lightness, chroma = KINDS[kind]
    turn = nth / of
    drift = 95.0 if of == 1 else 40.0 / (of - 1)
    lighter = 0.05 * math.sin(math.tau * turn + 0.5) if of > 1 else 0.0
    return oklch(lightness + lighter, chroma, 268.0 - drift * along - 360.0 * turn)


def oklch(lightness: float, chroma: float, hue: float) -> Colour:
    """The nearest sRGB colour to a perceived lightness and chroma, and a hue in degrees.

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


@contextlib.contextmanager
def drawing(path: str | os.PathLike[str], width: float, height: float) -> Iterator[Figure]:
    """A figure of a size in inches, written to ``path`` at the end. Equal figures make equal files."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'mpmd[plot]'") from error
    date = {".svg": "Date", ".pdf": "CreationDate"}.get(Path(path).suffix)
    metadata: dict[str, Any] = {date: None} if date else {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("font", **{"sans-serif": FONTS})
        matplotlib.rc("hatch", linewidth=0.7)
        matplotlib.rc("svg", fonttype="none", hashsalt="mpmd")
        figure = Figure(figsize=(width, height), dpi=144, facecolor="white")
        yield figure
        figure.savefig(path, metadata=metadata)


def axes_at(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes without lines, with their distances from the figure's left and top and their size in inches."""
    across, down = figure.get_size_inches()
    axes = figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=FAINT)
    axes.set_facecolor("none")
    return axes


def text_at(figure: Figure, left: float, top: float, text: str, **style: Any) -> None:
    """Writes text whose baseline begins at these distances in inches from the figure's left and top."""
    across, down = figure.get_size_inches()
    figure.text(left / across, 1 - top / down, text, **{"color": INK, "fontsize": 9, **style})
