"""Decides where everything outside the loop lives: on which groups each value is and each equation runs.

A value lives on a set of groups. Three rules, applied until nothing changes:

1. An equation runs where its large operands are. When those are on different groups, it runs on the one
   that has most of their bytes, and the rest is sent there.
2. What reads only arguments and scalars, such as a learning rate, a global norm or a zero, runs wherever
   its result is read: each such group is sent the scalars and computes for itself.
3. What is fed back comes out where it goes in: a result that a next step takes as an argument is on the
   groups that read the argument.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from jax.extend.core import JaxprEqn, Var

from mpmd.conds import can_be_split, with_results
from mpmd.cost import is_cheap
from mpmd.errors import CompileError
from mpmd.graph import Groups, PlacedEqn, PlacedGraph, TaskGraph
from mpmd.jaxpr import operands, size

NOWHERE: Groups = frozenset()


def place(graph: TaskGraph, mpmd_dim: int) -> PlacedGraph:
    """Places a task graph on ``mpmd_dim`` groups.

    Raises: ``CompileError`` when the schedule needs more groups.
    """
    return _Placement(graph, _stage_groups(graph, mpmd_dim)).run()


def _stage_groups(graph: TaskGraph, mpmd_dim: int) -> tuple[int, ...]:
    schedule = graph.schedule
    if schedule.mpmd_dim > mpmd_dim:
        raise CompileError(
            f"the schedule {schedule} runs on {schedule.mpmd_dim} groups, but the mesh has {mpmd_dim}; "
            "give it as many groups, or put several stages on a group with "
            f"Interleaved1F1B(num_stages={schedule.num_stages}, mpmd_dim={mpmd_dim})"
        )
    groups = {
        task.stage: mpmd_idx
        for mpmd_idx, cells in enumerate(graph.tasks)
        for cell in cells
        for task in cell.tasks
    }
    return tuple(groups[stage] for stage in range(graph.num_stages))


class _Placement:
    def __init__(self, graph: TaskGraph, stage_groups: tuple[int, ...]):
        self._graph = graph
        self._stage_groups = stage_groups
        self._loop_reads = self._groups_reading_in_loop()
        self._results = {a.result: frozenset({stage_groups[a.work.stage]}) for a in graph.accumulators}
        self._eqns: list[JaxprEqn]
        self._anchor_of: list[Groups]
        self._anchor_all()
        self._before = self._equations_before_loop()

    def run(self) -> PlacedGraph:
        graph = self._graph
        arguments = graph.traced.jaxpr.invars
        required: dict[int, Groups] = {}
        while True:
            runs, demanded = self._demand(required)
            fed_back = {
                out: demanded[arguments[argument]]
                for argument, out in graph.traced.fed_back
                if demanded[arguments[argument]]
            }
            # Grows with every round, so it ends: a group once asked for a result stays.
            grown = {out: groups | required.get(out, NOWHERE) for out, groups in fed_back.items()}
            if grown == required:
                break
            required = grown
        homes = self._homes(runs, demanded)
        eqns = self._levels(runs)
        output_groups = tuple(required.get(i) or homes[var] for i, var in enumerate(graph.outputs))
        return PlacedGraph(graph, self._stage_groups, eqns, homes, output_groups)

    def _groups_reading_in_loop(self) -> dict[Var, Groups]:
        reading: dict[Var, Groups] = collections.defaultdict(frozenset)
        graph = self._graph
        for stage in graph.stages:
            for var in stage.reads:
                reading[var] |= {self._stage_groups[stage.work.stage]}
        for accumulator in graph.accumulators:
            reading[accumulator.initial] |= {self._stage_groups[accumulator.work.stage]}
        return reading

    def _equations_before_loop(self) -> set[int]:
        """The positions of the equations that the loop needs, directly or not."""
        needed = {var for var, groups in self._loop_reads.items() if groups}
        before: set[int] = set()
        for i, eqn in reversed(list(enumerate(self._eqns))):
            if any(var in needed for var in eqn.outvars):
                before.add(i)
                needed.update(operands(eqn))
        return before

    # Rule 1: anchors.

    def _anchor_all(self) -> None:
        """For each variable the groups it is naturally on, if any, and else those it prefers.

        A conditional over the values of several groups, such as an optimizer's that skips a step, becomes
        one for each of them.
        """
        jaxpr = self._graph.traced.jaxpr
        read_in_loop = {
            var: self._loop_reads[var]
            for var in (*jaxpr.invars, *jaxpr.constvars)
            if size(var) > 1 and self._loop_reads.get(var)
        }
        self._anchor_from(read_in_loop)
        updated = {
            jaxpr.invars[argument]: self._anchors[result]
            for argument, out in self._graph.traced.fed_back
            if (result := self._graph.outputs[out]) in self._anchors and size(result) > 1
        }
        if updated.keys() - self._anchors.keys():
            # State that is read outside the loop alone is where its update is made.
            self._anchor_from(updated | read_in_loop)

    def _anchor_from(self, arguments: Mapping[Var, Groups]) -> None:
        self._eqns, self._anchor_of = [], []
        self._anchors: dict[Var, Groups] = {**self._results, **arguments}
        self._preferred: dict[Var, Groups] = dict(self._results)
        for whole in self._graph.outer:
            for eqn in self._parts(whole):
                anchor = self._anchor(eqn)
                self._eqns.append(eqn)
                self._anchor_of.append(anchor)
                preferred = anchor or self._preference(eqn)
                for var in eqn.outvars:
                    if anchor:
                        self._anchors[var] = anchor
                    self._preferred[var] = preferred

    def _parts(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        if not can_be_split(eqn):
            return [eqn]
        together: dict[Groups, list[int]] = collections.defaultdict(list)
        for i in range(len(eqn.outvars)):
            together[self._anchor(with_results(eqn, [i]))].append(i)
        return [eqn] if len(together) == 1 else [with_results(eqn, kept) for kept in together.values()]

    def _anchor(self, eqn: JaxprEqn) -> Groups:
        large = [var for var in operands(eqn) if size(var) > 1 and self._anchors.get(var)]
        if not large:
            return NOWHERE
        common = frozenset.intersection(*(self._anchors[var] for var in large))
        if common:
            return common
        held: collections.Counter[int] = collections.Counter()
        for var in large:
            for group in self._anchors[var]:
                held[group] += size(var)
        most = max(held.values())
        # Of equals the first: its stage's backward ends last, so the others' values are there by then.
        return frozenset({min(group for group, elements in held.items() if elements == most)})

    def _preference(self, eqn: JaxprEqn) -> Groups:
        preferred = [self._preferred[var] for var in operands(eqn) if self._preferred.get(var)]
        return frozenset({max(max(groups) for groups in preferred)}) if preferred else NOWHERE

    # Rules 2 and 3: demand.

    def _demand(self, required: Mapping[int, Groups]) -> tuple[list[Groups], dict[Var, Groups]]:
        """The groups that run each equation, and for each variable the groups that read it."""
        demanded: dict[Var, Groups] = collections.defaultdict(frozenset, self._loop_reads)
        for i, var in enumerate(self._graph.outputs):
            demanded[var] |= required.get(i, NOWHERE)
        runs = [NOWHERE] * len(self._eqns)
        for i, eqn in reversed(list(enumerate(self._eqns))):
            wanted = frozenset().union(*(demanded[var] for var in eqn.outvars))
            runs[i] = self._groups_to_run(eqn, self._anchor_of[i], wanted)
            for var in operands(eqn):
                demanded[var] |= runs[i]
        return runs, demanded

    def _groups_to_run(self, eqn: JaxprEqn, anchor: Groups, wanted: Groups) -> Groups:
        if anchor:
            return (anchor & wanted) or frozenset({min(anchor)})
        if not wanted:
            return self._preference(eqn) or self._unread(eqn)
        return wanted if is_cheap(eqn) else frozenset({min(wanted)})

    def _unread(self, eqn: JaxprEqn) -> Groups:
        """Where to run what only feeds a next step: scalars, such as a step counter, are for everyone."""
        scalars = all(size(atom) == 1 for atom in (*eqn.invars, *eqn.outvars))
        return frozenset(self._stage_groups if scalars else self._stage_groups[:1])

    def _homes(self, runs: list[Groups], demanded: Mapping[Var, Groups]) -> dict[Var, Groups]:
        jaxpr = self._graph.traced.jaxpr
        homes: dict[Var, Groups] = dict(self._results)
        for eqn, groups in zip(self._eqns, runs, strict=True):
            homes.update(dict.fromkeys(eqn.outvars, groups))
        returned = set(self._graph.outputs)
        for var in (*jaxpr.invars, *jaxpr.constvars):
            # An argument that is only returned has to be somewhere.
            homes[var] = demanded[var] or (frozenset({0}) if var in returned else NOWHERE)
        return homes

    # The order of exchanges.

    def _levels(self, runs: list[Groups]) -> tuple[PlacedEqn, ...]:
        """Numbers the exchanges; an equation is as late as it can be without delaying an exchange.

        What runs before the last exchange and is read after it would otherwise stay alive in between.
        """
        earliest = self._earliest_levels(runs)
        last: dict[tuple[bool, int], int] = collections.defaultdict(int)
        for i, levels in enumerate(earliest):
            for group, level in levels.items():
                last[i in self._before, group] = max(last[i in self._before, group], level)
        readers: dict[Var, list[int]] = collections.defaultdict(list)
        latest: list[dict[int, int]] = [{} for _ in self._eqns]
        for i, eqn in reversed(list(enumerate(self._eqns))):
            reading = [r for var in eqn.outvars for r in readers[var] if self._same_side(i, r)]
            for group in runs[i]:
                here = [latest[r][group] for r in reading if group in runs[r]]
                there = [level - 1 for r in reading for g, level in latest[r].items() if g not in runs[i]]
                bound = min([last[i in self._before, group], *here, *there])
                latest[i][group] = max(earliest[i][group], bound)
            for var in operands(eqn):
                readers[var].append(i)
        return tuple(
            PlacedEqn(eqn, levels, i not in self._before)
            for i, (eqn, levels) in enumerate(zip(self._eqns, latest, strict=True))
        )

    def _earliest_levels(self, runs: list[Groups]) -> list[dict[int, int]]:
        """For each equation and group that runs it, the exchanges that must come before."""
        maker: dict[Var, int] = {}
        levels: list[dict[int, int]] = []
        for i, eqn in enumerate(self._eqns):
            sources = [maker[v] for v in operands(eqn) if v in maker and self._same_side(i, maker[v])]
            levels.append(
                {
                    group: max((_available(levels[source], group) for source in sources), default=0)
                    for group in runs[i]
                }
            )
            maker.update(dict.fromkeys(eqn.outvars, i))
        return levels

    def _same_side(self, i: int, j: int) -> bool:
        return (i in self._before) == (j in self._before)


def _available(levels: Mapping[int, int], group: int) -> int:
    """The level from which ``group`` has a value that is made at ``levels``."""
    return levels[group] if group in levels else min(levels.values()) + 1
