"""Evens the work of groups that have several stages each, which a cut of even stages may leave uneven."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from mpmd.planner.search.partition import StageRangeCosts

MOST_STAGES = 8
"""Of more stages groups are even enough, as each has some of those with more work and of those with less."""


def even_groups(
    range_costs: Sequence[StageRangeCosts], homes: Sequence[int], cut: tuple[int, ...]
) -> tuple[int, ...]:
    """A cut near another one, of which the group that works longest works less.

    Layers go to neighbouring stages, at one or two boundaries at once, as long as that helps.

    Args:
      stretches: of the settings of the stages' groups.
      homes: the group of each stage.
      cut: the number of layers of each stage.
    """
    if len(cut) == len(set(homes)) or len(cut) > MOST_STAGES:
        return cut
    work = _work(range_costs, homes, cut)
    while True:
        found = min((_work(range_costs, homes, near), near) for near in (cut, *_near(cut)))
        if found[0] >= work:
            return cut
        work, cut = found


def _near(cut: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
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
