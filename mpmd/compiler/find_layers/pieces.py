"""Divides a sequence of work into pieces, at positions where little is handed over."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import numpy as np

_HANDING_OVER = 0.5
"""The cost of ending at a position with the usual bytes, over the cost of a piece with the usual work."""

_MOST_CROSSING = 4
"""A piece may end only where at most this many times the usual bytes pass; attention scores, for example,
exceed it."""


def best_pieces(
    work: Sequence[float], crossing: Sequence[int | None], usual: float, usual_crossing: float | None
) -> list[int]:
    """The positions that divide a sequence into pieces of about the usual work.

    The cost of a piece of work ``w`` is ``(w / usual) ** 2 + 1``, so that pieces of the usual work are best.
    The cost of a position is proportional to the bytes handed over there.

    Args:
      work: of each element.
      crossing: the bytes handed over before each element, and behind the last one; ``None`` where no value is
        handed over, and no piece can end.
      usual: the work of a piece.
      usual_crossing: the bytes that a usual position hands over; ``None``: the median of all positions.
    """
    if sum(work) < 1.5 * usual:
        return []
    seams = _seams(work, crossing, usual)
    if not seams:
        return []
    if usual_crossing is None:
        usual_crossing = statistics.median(crossing[at] or 0 for at in seams)
    most = _MOST_CROSSING * max(usual_crossing, 1)
    positions = [0, *(at for at in seams if (crossing[at] or 0) <= most), len(work)]
    before = np.concatenate([[0.0], np.cumsum(work)])[positions] / usual
    cost = np.zeros(len(positions))
    previous = np.zeros(len(positions), int)
    for end in range(1, len(positions)):
        of_piece = (before[end] - before[:end]) ** 2 + 1
        of_position = _HANDING_OVER * (crossing[positions[end]] or 0) / max(usual_crossing, 1)
        total = cost[:end] + of_piece
        previous[end] = int(np.argmin(total))
        cost[end] = total[previous[end]] + (of_position if end + 1 < len(positions) else 0.0)
    chosen = []
    end = int(previous[-1])
    while end:
        chosen.append(positions[end])
        end = int(previous[end])
    return chosen[::-1]


def _seams(work: Sequence[float], crossing: Sequence[int | None], usual: float) -> list[int]:
    """Between each two elements with much work, the last of the positions that hand over least."""
    large = [i for i, amount in enumerate(work) if amount > 0.05 * usual]
    seams = []
    for left, right in itertools.pairwise(large):
        known = [(amount, -at) for at in range(left + 1, right + 1) if (amount := crossing[at]) is not None]
        if known:
            seams.append(-min(known)[1])
    return seams
