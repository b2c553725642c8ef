"""Runs an update before a later loop that does not need it, where that frees memory and no group waits.

``place.py`` has already chosen the groups of the update. An optimizer's update of weights that later loops do
not read may come after all loops, but the gradients are in memory until then. Before a loop runs an update
that gives up more memory than it needs and reads only values on its own group, so that no group waits for a
message. The group of the loop's first stage is left out, because the other groups wait for it at the
beginning of the loop, unless the loop also ends on this group: then the step takes no longer.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import GroupSet, TaskGraph
from mpmd.compiler.jaxprs.equations import operands
from mpmd.compiler.jaxprs.work import nbytes

_Slot = tuple[int, int]
"""A number of loops that run before, and a group."""


class EarlyUpdates:
    """Lowers the number of loops that run before each equation, where that frees memory.

    Args:
      stage_groups: the group of each stage.
      runs: the groups that run each equation.
      homes: the groups that hold each value.
    """

    def __init__(
        self,
        graph: TaskGraph,
        stage_groups: Sequence[int],
        eqns: Sequence[JaxprEqn],
        runs: Sequence[GroupSet],
        segments: Sequence[int],
        homes: Mapping[Var, GroupSet],
    ):
        step = graph.step
        self._eqns, self._runs, self._segments, self._homes = eqns, runs, segments, homes
        self._end = len(step.loops)
        self._given = dict.fromkeys(homes, 0) | graph.loops_before
        for eqn in eqns:
            for var in eqn.outvars:
                self._given.pop(var, None)
        self._freed = {a.result for a in graph.accumulators} | {a.var for a in step.arguments if a.donated}
        self._returned = {result.var for result in step.results}
        self._last_loop: dict[Var, int] = collections.defaultdict(lambda: -1)
        for member in graph.stage_work:
            for var in member.reads:
                self._last_loop[var] = max(self._last_loop[var], step.loop_of(member.work.stage))
        self._readers: dict[Var, set[int]] = collections.defaultdict(set)
        for i, eqn in enumerate(eqns):
            for var in operands(eqn):
                self._readers[var].add(i)
        self._busy = [_busy_group(graph, stage_groups, loop.first_stage) for loop in step.loops]

    def segments(self) -> list[int]:
        refused: set[_Slot] = set()
        while True:  # what reads the results of others can only run as early as they do
            segments = self._attempt(refused)
            useless = {slot for slot in self._slots(segments) - refused if self._growth(segments, slot) >= 0}
            if not useless:
                return segments
            refused |= useless

    def _attempt(self, refused: Collection[_Slot]) -> list[int]:
        """Returns the segments with updates moved to earlier slots, except to ``refused`` slots."""
        known = dict(self._given)
        segments = list(self._segments)
        for i, eqn in enumerate(self._eqns):
            if self._segments[i] < self._end:
                known.update(dict.fromkeys(eqn.outvars, self._segments[i]))
            elif (earliest := self._earliest(i, known)) is not None:
                if earliest:
                    segments[i] = self._first_slot(earliest, self._runs[i], refused)
                if segments[i] < self._end or not earliest:
                    known.update(dict.fromkeys(eqn.outvars, segments[i] if earliest else 0))
        return self._with_operands(segments)

    def _earliest(self, i: int, known: Mapping[Var, int]) -> int | None:
        """The number of loops before an equation's operands are on its groups; ``None`` if they never are."""
        eqn = self._eqns[i]
        if eqn.effects or any(
            var not in known or not self._runs[i] <= self._homes[var] for var in operands(eqn)
        ):
            return None
        return max((known[var] for var in operands(eqn)), default=0)

    def _first_slot(self, earliest: int, groups: GroupSet, refused: Collection[_Slot]) -> int:
        for segment in range(earliest, self._end):
            free = self._busy[segment] not in groups and not any(
                (segment, group) in refused for group in groups
            )
            if free:
                return segment
        return self._end

    def _with_operands(self, segments: list[int]) -> list[int]:
        """Moves equations that read arguments alone, such as a learning rate, before their first reader."""
        for i, eqn in reversed(list(enumerate(self._eqns))):
            readers = [segments[r] for var in eqn.outvars for r in self._readers[var]]
            segments[i] = min([segments[i], *readers])
        return segments

    def _slots(self, segments: Sequence[int]) -> set[_Slot]:
        return {(segments[i], group) for i in self._advanced(segments) for group in self._runs[i]}

    def _advanced(self, segments: Sequence[int]) -> list[int]:
        return [i for i, segment in enumerate(segments) if segment < self._segments[i]]

    def _growth(self, segments: Sequence[int], slot: _Slot) -> int:
        """By how many bytes the memory of a group grows during the loop behind a slot."""
        segment, group = slot
        moved = {i for i in self._advanced(segments) if segments[i] == segment and group in self._runs[i]}
        read = {var for i in moved for var in operands(self._eqns[i])}
        computed = {var for i in moved for var in self._eqns[i].outvars}
        kept = [var for var in computed if var in self._returned or self._readers[var] - moved]
        freed = [
            var
            for var in (read - computed) & self._freed
            if var not in self._returned and self._last_loop[var] < segment and self._readers[var] <= moved
        ]
        return sum(map(nbytes, kept)) - sum(map(nbytes, freed))


def _busy_group(graph: TaskGraph, stage_groups: Sequence[int], stage: int) -> int | None:
    """The group that a loop waits for, of its first stage, unless the loop also ends there."""
    ends = any(member.work.stage == stage and member.work.kind != "fwd" for member in graph.stage_work)
    return None if ends else stage_groups[stage]
