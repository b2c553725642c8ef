"""Checks each level after the pass that made it; ``mpmd.verify`` checks the last one, the plan.

A fault that is found here is one of the compiler, never of the user's program.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import PlacedEqn, PlacedGraph, ShardedGraph, StageWork, TaskGraph
from mpmd.compiler.jaxprs.canonical import canonical_faults
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    free_variables,
    is_dropped,
    makers_of,
    operands,
    shape_of,
)
from mpmd.compiler.steps import CutStep, Loop, TracedStep
from mpmd.ir.stack import Leaf
from mpmd.language.annotate import mark_of
from mpmd.language.reduce import treduce_p


def check_traced_step(step: TracedStep) -> None:
    """Checks the canonical form, that values are defined once and before they are read, and marks in loops.

    Raises: ``AssertionError`` with every fault.
    """
    eqns, (arguments, results) = step.jaxpr.eqns, (step.jaxpr.invars, step.jaxpr.outvars)
    parts = (Loop.of(eqn) if eqn.primitive is treduce_p else eqn for eqn in eqns)
    faults = [
        *canonical_faults(eqns),
        *_undefined([*arguments, *step.constants], parts, results),
        *_marks_outside(eqns),
        *_changing_state(step.fed_back_leaves, step.argument_paths, arguments, results),
    ]
    _raise("traced step", step, faults)


def check_cut_step(step: CutStep) -> None:
    """Checks the canonical form, that values are defined once and before they are read, and marks.

    Arguments and results have the shapes of the layer ranges of leaves.

    Raises: ``AssertionError`` with every fault.
    """
    outside = [*itertools.chain(*step.outside)]
    segments = itertools.zip_longest(step.outside, step.loops)
    parts = (part for eqns, loop in segments for part in (*eqns, loop) if part is not None)
    arguments, results = ([member.var for member in each] for each in (step.arguments, step.results))
    faults = [
        *canonical_faults(itertools.chain(outside, *(loop.eqns for loop in step.loops))),
        *_undefined(step.inputs, parts, results),
        *_marks_outside(outside),
        *_marks_of_other_stages(step),
        *_changing_state(step.fed_back, [a.path for a in step.arguments], arguments, results),
        *_wrong_layer_ranges(step.argument_leaves, arguments),
        *_wrong_layer_ranges(step.result_leaves, results),
    ]
    _raise("cut step", step, faults)


def check_task_graph(graph: TaskGraph) -> None:
    _raise("task graph", graph, list(_task_graph_faults(graph)))


def check_sharded_graph(sharded: ShardedGraph) -> None:
    faults = [*_task_graph_faults(sharded.graph), *_changing_accumulators(sharded)]
    _raise("sharded graph", sharded, faults)


def check_placed_graph(placed: PlacedGraph) -> None:
    """Checks that every equation runs on a group, after its operands are there, and that results are held.

    Raises: ``AssertionError`` with every fault.
    """
    _raise("placed graph", placed, [*_unplaced(placed), *_too_early(placed)])


def _raise(level: str, value: object, faults: list[str]) -> None:
    if faults:
        text = "\n  ".join([f"the compiler made a {level} that is wrong:", *faults])
        raise AssertionError(f"{text}\n{value}")


def _undefined(before: Iterable[Var], parts: Iterable[JaxprEqn | Loop], results: Iterable[Atom]) -> list[str]:
    scope = _Definitions([])
    scope.define(before, "an argument or constant")
    for part in parts:
        if isinstance(part, Loop):
            scope.run_loop(part)
        else:
            scope.run([part])
    scope.read(results, "a result")
    return scope.faults


def _marks_outside(eqns: Iterable[JaxprEqn]) -> Iterator[str]:
    return (f"{eqn} is outside the loop" for eqn in eqns if mark_of(eqn))


def _changing_state(
    fed_back: Iterable[tuple[int, int]],
    paths: Sequence[str],
    arguments: Sequence[Var],
    results: Sequence[Atom],
) -> Iterator[str]:
    for i, j in fed_back:
        argument, result = aval_of(arguments[i]), aval_of(results[j])
        if (argument.shape, argument.dtype) != (result.shape, result.dtype):
            yield f"{paths[i]} is {argument}, but its next value is {result}"


class _Definitions:
    def __init__(self, defined: Iterable[Var]):
        self.defined: set[Var] = set(defined)
        self.faults: list[str] = []

    def define(self, variables: Iterable[Var], where: object) -> None:
        for var in variables:
            if var in self.defined and not is_dropped(var):
                self.faults.append(f"{where} defines {var} again")
            self.defined.add(var)

    def read(self, atoms: Iterable[Atom], where: object) -> None:
        for atom in atoms:
            if isinstance(atom, Var) and atom not in self.defined:
                self.faults.append(f"{where} reads {atom}, which is not defined before")

    def run(self, eqns: Iterable[JaxprEqn]) -> None:
        for eqn in eqns:
            self.read(eqn.invars, eqn.primitive)
            self.define(eqn.outvars, eqn.primitive)

    def run_loop(self, loop: Loop) -> None:
        self.read((result.initial for result in loop.results), "the start of a loop's result")
        outside = set(self.defined)
        self.define([loop.index, *loop.states], "the loop")
        self.run(loop.eqns)
        self.read((result.value for result in loop.results), "a loop's result")
        self.defined = outside
        self.define((result.result for result in loop.results), "a loop's result")


def _marks_of_other_stages(step: CutStep) -> Iterator[str]:
    for loop in step.loops:
        for eqn, mark in loop.marks:
            if mark.boundary.stage not in loop.stages:
                # A mark may follow the last stage.
                yield f"{eqn} ends stage {mark.boundary.stage}, the loop has {loop.stages}"


def _wrong_layer_ranges(leaves: Iterable[Leaf], variables: Iterable[Var]) -> Iterator[str]:
    shapes = [
        shape for leaf in leaves for shape in (leaf.stack.shapes(leaf.shape) if leaf.stack else (leaf.shape,))
    ]
    if shapes != (value_shapes := [*map(shape_of, variables)]):
        yield f"the layer ranges of leaves have the shapes {shapes}, but the values {value_shapes}"


def _task_graph_faults(graph: TaskGraph) -> Iterator[str]:
    yield from canonical_faults(itertools.chain(graph.outer, *(member.eqns for member in graph.stage_work)))
    yield from _undefined_outside(graph)
    yield from _wrong_work(graph)
    yield from _wrong_accumulators(graph)


def _undefined_outside(graph: TaskGraph) -> list[str]:
    step, scope = graph.step, _Definitions([])
    scope.define(step.inputs, "an argument or constant")
    scope.define(dict.fromkeys(a.result for a in graph.accumulators), "an accumulator")
    scope.run(graph.outer)
    scope.read((result.var for result in step.results), "a result")
    scope.read((accumulator.initial for accumulator in graph.accumulators), "an accumulator")
    after = graph.loops_before
    for eqn in graph.outer:
        if loops := [after[var] for var in operands(eqn) if var in after]:
            after |= dict.fromkeys(eqn.outvars, max(loops))
    needed = [(var, member.work) for member in graph.stage_work for var in member.reads]
    needed += [(accumulator.initial, accumulator.work) for accumulator in graph.accumulators]
    early = dict.fromkeys(var for var, work in needed if after.get(var, 0) > step.loop_of(work.stage))
    return scope.faults + [f"the loop needs {var}, which needs the loop" for var in early]


def _wrong_work(graph: TaskGraph) -> Iterator[str]:
    known = {*graph.step.inputs, *makers_of(graph.outer)}
    known |= {
        *(loop.index for loop in graph.step.loops),
        *(accumulator.result for accumulator in graph.accumulators),
    }
    states = {(a.state, a.work) for a in graph.accumulators}
    readers: collections.Counter[Var] = collections.Counter()
    for member in graph.stage_work:
        readers.update(set(member.reads))
    seen: set[object] = set()
    for member in graph.stage_work:
        if member.work in seen:
            yield f"{member.work} is there twice"
        seen.add(member.work)
        yield from _wrong_reads_and_makes(member, readers)
        for var in member.reads:
            if var not in known and (var, member.work) not in states:
                yield f"{member.work} reads {var}, which nothing before it makes"
        known.update(member.makes)


def _wrong_reads_and_makes(member: StageWork, readers: Mapping[Var, int]) -> Iterator[str]:
    scope = _Definitions(member.reads)
    scope.run(member.eqns)
    yield from (f"{member.work}: {fault}" for fault in scope.faults)
    if list(member.reads) != free_variables(member.eqns):
        yield f"{member.work} does not read just what its equations do"
    read_elsewhere = [v for eqn in member.eqns for v in eqn.outvars if readers[v]]
    if list(member.makes) != read_elsewhere:
        yield f"{member.work} does not make just what other work reads"
    if any(map(mark_of, member.eqns)):
        yield f"{member.work} has a mark"


def _wrong_accumulators(graph: TaskGraph) -> Iterator[str]:
    updates = {m.work: {v for eqn in m.eqns for v in eqn.outvars} for m in graph.stage_work}
    read = collections.Counter(var for eqn in graph.outer for var in operands(eqn))
    read.update(var for member in graph.stage_work for var in member.reads)
    shared = {a.state: (a.initial, a.result) for a in graph.accumulators}
    read.update(initial for initial, _ in shared.values())
    for accumulator in graph.accumulators:
        if (accumulator.initial, accumulator.result) != shared[accumulator.state]:
            yield f"the accumulators with the state {accumulator.state} start or end differently"
        if accumulator.updated not in updates.get(accumulator.work, ()):
            yield f"{accumulator.work} does not update the accumulator of {accumulator.result}"
        if read[accumulator.initial] != 1:
            yield f"{accumulator.initial}, which an accumulator takes over, is read elsewhere"


def _changing_accumulators(sharded: ShardedGraph) -> Iterator[str]:
    for a in sharded.graph.accumulators:
        stages = (a.initial, a.state, a.updated, a.result)
        avals = [aval_of(var) for var in stages]
        if len({(aval.shape, aval.dtype) for aval in avals}) > 1:
            yield f"the accumulator of {a.result} changes from {avals}"
        if len({sharded.specs.get(var) for var in stages}) > 1:
            yield f"the spec of the accumulator of {a.result} changes"


def _unplaced(placed: PlacedGraph) -> Iterator[str]:
    graph, groups = placed.graph, set(range(placed.mpmd_dim))
    computed = makers_of(member.eqn for member in placed.eqns).keys()
    outer_results = {var for eqn in graph.outer for var in eqn.outvars if not is_dropped(var)}
    yield from (f"nothing makes {var}" for var in outer_results - computed)
    if not set(placed.stage_groups) <= groups:
        yield f"stages are on groups {placed.stage_groups} of {placed.mpmd_dim}"
    for member in placed.eqns:
        if not member.levels or not member.levels.keys() <= groups:
            yield f"{member.eqn.primitive} runs on the groups {sorted(member.levels)}"
    read = {var for member in placed.eqns for var in operands(member.eqn)}
    read |= {var for work in graph.stage_work for var in work.reads} - graph.in_loops
    yield from (f"{var} is read, but on no group" for var in read if not placed.homes.get(var))
    for result, held in zip(graph.step.results, placed.output_groups, strict=True):
        if not held or not held <= groups:
            yield f"the result {result.path} is on the groups {sorted(held)}"


def _too_early(placed: PlacedGraph) -> Iterator[str]:
    makers: dict[Var, PlacedEqn] = {}
    results = placed.graph.loops_before
    for member in placed.eqns:
        for var in operands(member.eqn):
            maker = makers.get(var)
            if member.segment < (maker.segment if maker else results.get(var, 0)):
                yield f"{member.eqn.primitive} runs before the loop and reads {var}, which is made after it"
            if maker is not None and maker.segment == member.segment:
                elsewhere = min(maker.levels.values(), default=0) + 1
                for group, level in member.levels.items():
                    if level < maker.levels.get(group, elsewhere):
                        yield f"{member.eqn.primitive} reads {var} on group {group} too early"
        makers.update(dict.fromkeys(member.eqn.outvars, member))
