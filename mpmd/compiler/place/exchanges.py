"""Says how many exchanges between groups come before each equation outside of loops."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import GroupSet, PlacedEqn
from mpmd.compiler.jaxprs.equations import operands


def number_exchanges(
    eqns: Sequence[JaxprEqn], runs: Sequence[GroupSet], segments: Sequence[int]
) -> tuple[PlacedEqn, ...]:
    """The equations, each with how many exchanges come before it on the groups that run it.

    An equation is as late as it can be without delaying an exchange. What runs before the last exchange and
    is read after it would otherwise stay alive in between.

    Args:
      runs: for each equation, the groups that run it.
      segments: for each equation, how many loops run before it.
    """
    earliest = _earliest_levels(eqns, runs, segments)
    last: dict[tuple[int, int], int] = collections.defaultdict(int)
    for segment, levels in zip(segments, earliest, strict=True):
        for group, level in levels.items():
            last[segment, group] = max(last[segment, group], level)
    readers: dict[Var, list[int]] = collections.defaultdict(list)
    latest: list[dict[int, int]] = [{} for _ in eqns]
    for i, eqn in reversed(list(enumerate(eqns))):
        reading = [r for var in eqn.outvars for r in readers[var] if segments[r] == segments[i]]
        for group in runs[i]:
            here = [latest[r][group] for r in reading if group in runs[r]]
            there = [level - 1 for r in reading for g, level in latest[r].items() if g not in runs[i]]
            bound = min([last[segments[i], group], *here, *there])
            latest[i][group] = max(earliest[i][group], bound)
        for var in operands(eqn):
            readers[var].append(i)
    return tuple(map(PlacedEqn, eqns, latest, segments))


def _earliest_levels(
    eqns: Sequence[JaxprEqn], runs: Sequence[GroupSet], segments: Sequence[int]
) -> list[dict[int, int]]:
    maker: dict[Var, int] = {}
    levels: list[dict[int, int]] = []
    for i, eqn in enumerate(eqns):
        makers = (maker[var] for var in operands(eqn) if var in maker)
        sources = [j for j in makers if segments[j] == segments[i]]
        levels.append(
            {
                group: max((_available(levels[source], group) for source in sources), default=0)
                for group in runs[i]
            }
        )
        maker.update(dict.fromkeys(eqn.outvars, i))
    return levels


def _available(levels: Mapping[int, int], group: int) -> int:
    return levels[group] if group in levels else min(levels.values()) + 1
