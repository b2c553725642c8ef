"""Decides where everything outside of loops lives: on which groups each value is and each equation runs.

The update of a weight runs on the group of the stage that reads the weight. If several groups read it, the
update runs on the group that adds the gradients, which sends the new weight to the other groups. This follows
from the rules below.

A value lives on a set of groups. It is large if it has more than one element. Three rules, applied until
nothing changes:

1. An equation runs where its large operands are. When the operands are on different groups, it runs on the
   group with most of their elements (the first of equal groups), which is sent the rest.
2. An equation that reads only arguments and scalars, such as a learning rate, a global norm or a zero, runs
   wherever its result is read: each reading group is sent the scalars and computes the rest itself. So does
   an equation that repeats a smaller array, such as the norms of rows.
3. State stays where it is: a result that a next step takes as an argument is on the groups that read the
   argument. State that is read only outside of loops, such as an optimizer's, is on the group that updates
   it. Which result a next step takes is the guess of ``trace/fed_back.py``.

A gathered copy of a value is made by each group whose tasks read it: the value is sent, and not the copy.

In a function without a loop, arguments that groups hold take the part of the values that a loop reads and
computes. They stay, and equations that read large ones run on their groups (rule 1). Results stay on the
groups that hold their inputs, in place of rule 3, unless the caller asks for other groups. A result of
several groups is computed on one group and sent, so that all have the same bits; so is any other array.
Values that round nothing, such as zeros, integers and keys, are computed by each group.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.argument_specs import ArgumentSpecs
from mpmd.compiler.graph import GroupSet, PlacedGraph, ShardedGraph
from mpmd.compiler.jaxprs.control_flow import (
    CONTROL_FLOW,
    as_selections,
    labels_of_results,
    with_results,
)
from mpmd.compiler.jaxprs.cost import is_cheap, is_exact
from mpmd.compiler.jaxprs.equations import Atom, is_dropped, operands, size
from mpmd.compiler.place.check_specs import check_specs
from mpmd.compiler.place.early_updates import EarlyUpdates
from mpmd.compiler.place.exchanges import number_exchanges
from mpmd.compiler.place.place_stages import place_stages
from mpmd.language.callbacks import callback_of

NOWHERE: GroupSet = frozenset()


def place(
    sharded: ShardedGraph,
    submeshes: Sequence[AbstractMesh],
    specs: ArgumentSpecs,
    parts: Mapping[str, Sequence[int]],
) -> PlacedGraph:
    """Places a sharded graph on groups.

    Args:
      submeshes: the shape of each group's submesh.
      specs: how arguments and results are sharded; where arguments are already, and results are to be. An
        argument that is nowhere yet the caller sends to whoever reads it, and a result that may be anywhere
        stays where it is made.
      parts: the groups of each part of the mesh, by its name, for loops that name one.

    Raises: ``CompileError`` when a schedule needs more groups, and naming every argument and result whose
      spec does not divide it on a group that holds it.
    """
    stage_groups = place_stages(sharded.graph, submeshes, parts)
    placed = _Placer(sharded, stage_groups, specs).run(len(submeshes))
    check_specs(placed, submeshes, specs)
    return placed


class _Placer:
    def __init__(
        self,
        sharded: ShardedGraph,
        stage_groups: tuple[int, ...],
        specs: ArgumentSpecs,
    ):
        graph = sharded.graph
        self._graph = graph
        self._specs = sharded.specs
        self._gathered = sharded.gathered
        self._has_loop = bool(graph.step.loops)
        self._step = graph.step
        self._arguments = [argument.var for argument in graph.step.arguments]
        self._inputs = graph.step.inputs
        self._results = [result.var for result in graph.step.results]
        self._returned = set(self._results)
        held = zip(self._arguments, specs.held, strict=True)
        self._held = {var: frozenset(there.mpmd_idxs) for var, there in held if there.mpmd_idxs}
        self._asked = [frozenset(there.mpmd_idxs) for there in specs.wanted]
        self._stage_groups = stage_groups
        self._loop_reads = self._groups_reading_in_loop()
        self._accumulated = {a.result: frozenset({stage_groups[a.work.stage]}) for a in graph.accumulators}
        self._eqns: list[JaxprEqn]
        self._anchor_of: list[GroupSet]
        self._anchor_all()
        self._segments = self._segments_of_equations()

    def run(self, mpmd_dim: int) -> PlacedGraph:
        required = self._required_state() if self._has_loop else self._required_results()
        runs, demanded = self._demand(required)
        homes = self._homes(runs, demanded)
        updates = EarlyUpdates(self._graph, self._stage_groups, self._eqns, runs, self._segments, homes)
        return PlacedGraph(
            graph=self._graph,
            mpmd_dim=mpmd_dim,
            stage_groups=self._stage_groups,
            eqns=number_exchanges(self._eqns, runs, updates.segments()),
            homes=homes,
            output_groups=tuple(required.get(i) or homes[var] for i, var in enumerate(self._results)),
            specs=self._specs,
        )

    def _required_state(self) -> dict[int, GroupSet]:
        """Maps each result that the next step takes as an argument to the groups that read the argument."""
        required: dict[int, GroupSet] = {}
        while True:
            _, demanded = self._demand(required)
            carried = {
                out: demanded[self._arguments[argument]]
                for argument, out in self._step.fed_back
                if demanded[self._arguments[argument]]
            }
            # Grows with every round, so it ends: a group once asked for a result stays.
            grown = {out: groups | required.get(out, NOWHERE) for out, groups in carried.items()}
            if grown == required:
                return required
            required = grown

    def _required_results(self) -> dict[int, GroupSet]:
        """Returns, by the positions of results of a step without a loop, the groups on which each has to be.

        These are the groups that the caller asks for, or else the groups that hold the operands of the
        result. A scalar that a next call takes as an argument is on all groups that hold the argument. A
        large result computed from scalars alone is on one group.
        """
        required: dict[int, GroupSet] = {i: groups for i, groups in enumerate(self._asked) if groups}
        for argument, i in self._step.fed_back:
            var = self._arguments[argument]
            if size(var) == 1 and var in self._held:
                required.setdefault(i, self._held[var])
        for i, var in enumerate(self._results):
            made_of_scalars = size(var) > 1 and not self._anchors.get(var)
            if held := self._preferred.get(var):
                required.setdefault(i, frozenset({min(held)}) if made_of_scalars else held)
        return required

    def _groups_reading_in_loop(self) -> dict[Var, GroupSet]:
        reading: dict[Var, GroupSet] = collections.defaultdict(frozenset)
        for var, stage in self._graph.stage_reads:
            reading[var] |= {self._stage_groups[stage]}
        for copy, var in self._gathered.items():
            reading[var] |= reading[copy]
        return reading

    def _segments_of_equations(self) -> list[int]:
        """The number of loops that run before each equation: those before the first one that needs it.

        What no loop needs comes after all, so that no loop waits for it, unless ``early_updates.py`` finds
        a better segment. Callbacks stay where they are.
        """
        needed_by = self._first_loops()
        after = len(self._step.loops)
        written = {
            callback: segment
            for segment, eqns in enumerate(self._step.outside)
            for eqn in eqns
            if (callback := callback_of(eqn))
        }
        segments = [after] * len(self._eqns)
        for i, eqn in reversed(list(enumerate(self._eqns))):
            loops = [needed_by[var] for var in eqn.outvars if var in needed_by]
            if callback := callback_of(eqn):
                loops.append(written[callback])
            segments[i] = min(loops, default=after)
            for var in operands(eqn):
                needed_by[var] = min(needed_by.get(var, after), segments[i])
        return segments

    def _first_loops(self) -> dict[Var, int]:
        first_loops: dict[Var, int] = {}
        for var, stage in self._graph.stage_reads:
            loop = self._step.loop_of(stage)
            first_loops[var] = min(first_loops.get(var, loop), loop)
        return first_loops

    def _anchor_all(self) -> None:
        """Finds for each variable the groups of its large operands; without any, the groups that it prefers.

        A conditional or a loop over the values of several groups, such as an optimizer's, becomes one for
        each group. If a result of a conditional depends on several groups, as where a branch clips by the
        norm of all gradients, the branches are computed one equation at a time, and the results are selected.
        """
        read_in_loop = {
            var: self._loop_reads[var] for var in self._inputs if size(var) > 1 and self._loop_reads.get(var)
        }
        read_in_loop |= {var: groups for var, groups in self._held.items() if size(var) > 1}
        self._anchor_from(read_in_loop)
        updated = {
            self._arguments[argument]: self._anchors[result]
            for argument, out in self._step.fed_back
            if (result := self._results[out]) in self._anchors and size(result) > 1
        }
        if updated.keys() - self._anchors.keys():
            # State that is read outside the loop alone is where its update is made.
            self._anchor_from(updated | read_in_loop)

    def _anchor_from(self, arguments: Mapping[Var, GroupSet]) -> None:
        self._eqns, self._anchor_of = [], []
        self._anchors: dict[Var, GroupSet] = {**self._accumulated, **arguments}
        self._preferred: dict[Var, GroupSet] = {**self._accumulated, **self._held}
        self._moved = set(self._held)  # what groups hold, and what they only slice, join or convert of it
        for whole in self._graph.outer:
            for eqn in self._parts_by_group(whole):
                anchor = self._anchor(eqn)
                self._eqns.append(eqn)
                self._anchor_of.append(anchor)
                if self._moved.issuperset(operands(eqn)) and is_exact(eqn):
                    self._moved.update(eqn.outvars)
                preferred = anchor or self._preference(eqn)
                for var in eqn.outvars:
                    if anchor:
                        self._anchors[var] = anchor
                    self._preferred[var] = preferred

    def _parts_by_group(self, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        if eqn.effects or eqn.primitive.name not in CONTROL_FLOW:
            yield eqn
            return
        together: dict[Hashable, list[int]] = {None: []}
        for i, label in enumerate(labels_of_results(eqn, [*map(self._label, eqn.invars)])):
            if not is_dropped(eqn.outvars[i]):
                held_by = [groups for groups, is_large in label if is_large]
                key = frozenset.intersection(*held_by) or None if held_by else label
                together.setdefault(key, []).append(i)
        if together[None] and eqn.primitive.name == "cond":
            for member in as_selections(eqn):
                yield from self._parts_by_group(member)
            return
        # What depends on several groups comes first, and keeps all it needs. Counters come with others.
        together[NOWHERE] = together.pop(NOWHERE, [])
        defined: set[Var] = set()
        for results in together.values():
            if kept := [i for i in results if eqn.outvars[i] not in defined]:
                part = with_results(eqn, kept)
                yield part.replace(outvars=[Var(v.aval) if v in defined else v for v in part.outvars])
                defined.update(part.outvars)

    def _label(self, atom: Atom) -> frozenset[tuple[GroupSet, bool]]:
        """Returns a large operand's groups with ``True``; a small operand's preferred ones with ``False``."""
        if not isinstance(atom, Var):
            return frozenset()
        is_large = size(atom) > 1 and atom in self._anchors
        groups = self._anchors[atom] if is_large else self._preferred.get(atom)
        return frozenset({(groups, is_large)} if groups else ())

    def _anchor(self, eqn: JaxprEqn) -> GroupSet:
        if eqn.outvars and eqn.outvars[0] in self._gathered:
            return self._loop_reads[eqn.outvars[0]]
        large = [var for var in operands(eqn) if size(var) > 1 and self._anchors.get(var)]
        if not large or (self._has_loop and _repeats(eqn)):
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

    def _preference(self, eqn: JaxprEqn) -> GroupSet:
        preferred = [self._preferred[var] for var in operands(eqn) if self._preferred.get(var)]
        if not preferred:
            return NOWHERE
        if not self._has_loop and (common := frozenset.intersection(*preferred)):
            return common
        return frozenset({max(map(max, preferred))})

    def _demand(self, required: Mapping[int, GroupSet]) -> tuple[list[GroupSet], dict[Var, GroupSet]]:
        """The groups that run each equation, and for each variable the groups that read it."""
        demanded: dict[Var, GroupSet] = collections.defaultdict(frozenset, self._loop_reads)
        for i, var in enumerate(self._results):
            demanded[var] |= required.get(i, NOWHERE)
        runs = [NOWHERE] * len(self._eqns)
        for i, eqn in reversed(list(enumerate(self._eqns))):
            readers = frozenset().union(*(demanded[var] for var in eqn.outvars))
            runs[i] = self._groups_to_run(eqn, self._anchor_of[i], readers)
            for var in operands(eqn):
                demanded[var] |= runs[i]
        return runs, demanded

    def _groups_to_run(self, eqn: JaxprEqn, anchor: GroupSet, readers: GroupSet) -> GroupSet:
        if anchor:
            moves = not self._has_loop and bool(readers) and self._moved.issuperset(eqn.outvars)
            if moves and eqn.primitive.name == "concatenate":
                return readers  # by way of a holder, what is put together would travel twice
            able = (anchor & readers) or frozenset({min(anchor)})
            return able if self._has_loop or moves else frozenset({min(able)})
        if not readers:
            groups = self._preference(eqn) or self._unread(eqn)
            return frozenset({min(groups)}) if eqn.effects else groups  # which are to happen once
        return readers if self._may_repeat(eqn) else frozenset({min(readers)})

    def _may_repeat(self, eqn: JaxprEqn) -> bool:
        """Whether each group that reads an equation's results computes them itself."""
        scalars = all(size(var) == 1 and var not in self._returned for var in eqn.outvars)
        return is_cheap(eqn) and (self._has_loop or scalars or is_exact(eqn))

    def _unread(self, eqn: JaxprEqn) -> GroupSet:
        """The groups of equations that only feed a next step: scalars, such as a step counter, go to all."""
        if not self._has_loop:
            return frozenset({0})
        scalars = all(size(atom) == 1 for atom in (*eqn.invars, *eqn.outvars))
        return frozenset(self._stage_groups if scalars else self._stage_groups[:1])

    def _homes(self, runs: list[GroupSet], demanded: Mapping[Var, GroupSet]) -> dict[Var, GroupSet]:
        homes: dict[Var, GroupSet] = dict(self._accumulated)
        for eqn, groups in zip(self._eqns, runs, strict=True):
            homes.update(dict.fromkeys(eqn.outvars, groups))
        for var in self._inputs:
            # An argument that is only returned has to be somewhere.
            homes[var] = demanded[var] or (frozenset({0}) if var in self._returned else NOWHERE)
        for var, held in self._held.items():
            if demanded[var]:
                homes[var] = (demanded[var] & held) or frozenset({min(held)})
        return homes


def _repeats(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and size(eqn.outvars[0]) > size(eqn.invars[0])
