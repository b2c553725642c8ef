"""Evens the work of groups that have several stages each, which a cut of even stages may leave uneven."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from mpmd.planner.search.partition import StageRangeCosts

MOST_STAGES = 8
"""With more stages groups are even enough, since each has stages with more work and with less."""


def even_groups(
    range_costs: Sequence[StageRangeCosts], homes: Sequence[int], cut: tuple[int, ...]
) -> tuple[int, ...]:
    """A cut near the given one, in which the group that works longest works less.

    Layers move to neighbouring stages, at one or two boundaries at once, as long as that helps.

    Args:
      range_costs: for each stage, of ranges of layers on its group.
      homes: the group of each stage.
      cut: the number of layers of each stage.
    """
    if len(cut) == len(set(homes)) or len(cut) > MOST_STAGES:
        return cut
    work = _work(range_costs, homes, cut)
    while True:
        least_work, best_cut = min((_work(range_costs, homes, near), near) for near in (cut, *_near(cut)))
        if least_work >= work:
            return cut
        work, cut = least_work, best_cut


def _near(cut: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The cuts with a layer moved at one or two boundaries."""
    boundaries = range(1, len(cut))
    for moved in itertools.chain(((b,) for b in boundaries), itertools.combinations(boundaries, 2)):
        for changes in itertools.product((-1, 1), repeat=len(moved)):
            layers = [*cut]
            for boundary, change in zip(moved, changes, strict=True):
                layers[boundary - 1] += change
                layers[boundary] -= change
            if min(layers) > 0:
                yield tuple(layers)


def _work(
    range_costs: Sequence[StageRangeCosts], homes: Sequence[int], cut: Sequence[int]
) -> tuple[float, ...]:
    """The seconds of the groups for a microbatch, the longest first."""
    bounds = [0, *itertools.accumulate(cut)]
    of_groups = dict.fromkeys(homes, 0.0)
    for stage, home in enumerate(homes):
        of_groups[home] += float(range_costs[stage].seconds[bounds[stage], bounds[stage + 1]])
    return tuple(sorted(of_groups.values(), reverse=True))
