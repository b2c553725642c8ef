"""Work outside of loops, such as optimizers: after each loop, and before the first one.

Each value that enters or leaves this work is read or written once. Most of the work is elementwise, so that
no product hides the time of reading and writing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.jaxprs.equations import operands
from mpmd.compiler.jaxprs.flat import FlatEquations
from mpmd.compiler.jaxprs.work import total_operations
from mpmd.planner.layer_profile import TaskWork
from mpmd.planner.profiling.layered_step import LayeredStep
from mpmd.planner.profiling.ownership import nbytes


def work_outside(step: LayeredStep) -> tuple[TaskWork, ...]:
    """The work for each loop. A step without loops updates its weights in its one task, and not outside."""
    graph = step.graph
    if not graph.step.loops:
        return (_work((), 2 * sum(map(nbytes, step.ownership.weights))),)
    eqns_by_loop = _by_loop(graph)
    entering = {argument.var for argument in graph.step.arguments}
    entering |= {accumulator.result for accumulator in graph.accumulators}
    works = []
    for number, eqns in enumerate(eqns_by_loop):
        computed = {var for eqn in eqns for var in eqn.outvars}
        read = {var for eqn in eqns for var in operands(eqn)} & entering
        moved = read | (computed & _read_after(graph, eqns_by_loop, number))
        works.append(_work(eqns, sum(map(nbytes, moved))))
        entering |= computed
    return tuple(works)


def _by_loop(graph: TaskGraph) -> list[list[JaxprEqn]]:
    """For each loop, the equations that depend on its results and on no results of a later loop."""
    after: dict[Var, int] = {a.result: graph.step.loop_of(a.work.stage) for a in graph.accumulators}
    eqns_by_loop: list[list[JaxprEqn]] = [[] for _ in graph.step.loops]
    for eqn in graph.outer:
        loop = max((after.get(var, 0) for var in operands(eqn)), default=0)
        eqns_by_loop[loop].append(eqn)
        after |= dict.fromkeys(eqn.outvars, loop)
    return eqns_by_loop


def _read_after(graph: TaskGraph, eqns_by_loop: Sequence[Sequence[JaxprEqn]], number: int) -> set[Var]:
    read = {result.var for result in graph.step.results}
    for eqn in itertools.chain.from_iterable(eqns_by_loop[number + 1 :]):
        read.update(operands(eqn))
    for member in graph.stage_work:
        if graph.step.loop_of(member.work.stage) > number:
            read.update(member.reads)
    return read


def _work(eqns: Iterable[JaxprEqn], moved: float) -> TaskWork:
    operations = sum(one.times * total_operations([one.eqn]) for one in FlatEquations().add(eqns))
    return TaskWork(float(operations), float(moved), float(moved))
