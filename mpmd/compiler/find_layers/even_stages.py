"""Divides layers into stages of about equal work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_SLACK = 1.05
"""The most work of a stage, over the least that the stage with most work can have."""

_HANDING_OVER = 0.1
"""The cost of handing over the most bytes of any position, as a share of an average stage's work."""


def even_stages(work: Sequence[float], leaving: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The numbers of layers of the stages.

    The stage with most work has hardly more than it must have. Within that limit, work is as even as
    possible, and stages end where fewer bytes are handed over.

    Args:
      work: of each layer.
      leaving: bytes handed over behind each layer.
      num_stages: at most as many as layers.
    """
    assert 1 <= num_stages <= len(work), f"{len(work)} layers do not make {num_stages} stages"
    before = np.concatenate([[0.0], np.cumsum(work)])
    largest = _dynamic_programme(before, num_stages, lambda of_stages, end: of_stages, np.maximum)
    limit = _SLACK * float(largest[0])
    mean = before[-1] / num_stages or 1.0
    fees = _HANDING_OVER * np.asarray([0, *leaving[:-1], 0]) / max([*leaving[:-1], 1])

    def cost(of_stages: np.ndarray, end: int) -> np.ndarray:
        return np.where(of_stages <= limit, (of_stages / mean) ** 2 + fees[end], np.inf)

    _, ends = _dynamic_programme(before, num_stages, cost, np.add)
    return tuple(np.diff([0, *ends]).tolist())


def _dynamic_programme(
    before: np.ndarray,
    num_stages: int,
    cost: Callable[[np.ndarray, int], np.ndarray],
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[float, list[int]]:
    """Returns the least combined cost of stages, and the layers at which the stages end.

    Args:
      before: the work before each layer, and the work of all layers at the end.
      cost: the cost of stages that end at one layer, from the work of each and the index of the layer.
      combine: the cost of several stages, from the cost of all but the last and the cost of the last.
    """
    count = len(before) - 1
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    last = []
    for stage in range(1, num_stages + 1):
        following = np.full(count + 1, np.inf)
        chosen = np.zeros(count + 1, int)
        for end in range(stage, count - (num_stages - stage) + 1):
            starts = slice(stage - 1, end)
            total = combine(best[starts], cost(before[end] - before[starts], end))
            at = len(total) - 1 - int(np.argmin(total[::-1]))
            following[end], chosen[end] = total[at], stage - 1 + at
        best = following
        last.append(chosen)
    ends = [count]
    for chosen in reversed(last[1:]):
        ends.append(int(chosen[ends[-1]]))
    return float(best[count]), ends[::-1]
