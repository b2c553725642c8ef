"""Has accumulators hold partial sums, where the work that updates them can make these."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.graph import Accumulator, ShardedGraph, StageWork, TaskGraph, stage_work
from mpmd.compiler.jaxprs.equations import aval_of, needed_eqns, operands, substitute
from mpmd.compiler.jaxprs.sharded_dimensions import (
    Axes,
    ShardedDimensions,
    as_spec,
    follow,
    without,
)
from mpmd.compiler.request import PartialSums
from mpmd.compiler.shard.make_partial_sums import PartialSum, PartialSumMaker
from mpmd.compiler.shard.partial_sums import Allowed, RewrittenEqns, as_partial_sums
from mpmd.ir.plan import TaskType
from mpmd.ir.specs import axes_of


def with_partial_sums(
    sharded: ShardedGraph,
    submesh: AbstractMesh,
    outer: Mapping[Var, ShardedDimensions],
    axes_of_partial_sums: frozenset[str],
    partial_sums: PartialSums,
) -> ShardedGraph:
    """The graph with partial sums in accumulators.

    Args:
      outer: the known shardings of values outside the loop.
      axes_of_partial_sums: the mesh axes along which sums may be partial.
      partial_sums: ``"replicated"`` if sums stay whole along the axes that shard them already.
    """
    graph = sharded.graph
    maker = PartialSumMaker(submesh)
    # 1. The work of each stage computes partial sums where it can.
    dimensions = follow((eqn for member in graph.stage_work for eqn in member.eqns), outer, submesh.shape)
    allowed = dict.fromkeys((a.updated for a in graph.accumulators), axes_of_partial_sums)
    if partial_sums != "all":
        allowed = {
            a.updated: axes_of_partial_sums.difference(axes_of(sharded.dimensions(a.result)))
            for a in graph.accumulators
        }
    rewritten = _all_rewritten(graph, allowed, dimensions, maker)
    # 2. The accumulators that it updates by partial sums start from such, and are summed up after the loop.
    states: dict[Var, Accumulator] = {}  # by the whole state
    before: dict[Var, list[JaxprEqn]] = {}  # by the whole initial value
    after: dict[Var, JaxprEqn] = {}  # by the whole result
    accumulators: list[Accumulator] = []
    specs = dict(sharded.specs)
    for a in graph.accumulators:
        sums = rewritten[a.work].partial.get(a.updated)
        if sums is None:
            accumulators.append(a)
            continue
        if a.state not in states:
            before[a.initial], initial = maker.as_first(a.initial, sums.axes)
            result = PartialSum(Var(aval_of(initial.var)), sums.axes)
            after[a.result] = maker.sum_up(result, a.result)
            state = rewritten[a.work].carry[a.state].var
            states[a.state] = dataclasses.replace(a, state=state, initial=initial.var, result=result.var)
        new = dataclasses.replace(states[a.state], work=a.work, updated=sums.var)
        accumulators.append(new)
        # An axis that shards the partial sums shards nothing else.
        spec = as_spec((sums.axes, *without(sharded.dimensions(a.result), sums.axes)))
        specs |= dict.fromkeys((new.state, new.updated, new.initial, new.result), spec)
    # 3. Equations that nothing needs any more go, within the work and between works.
    pairs = list(zip(graph.accumulators, accumulators, strict=True))
    eqns = {member.work: _live_eqns(member, rewritten[member.work], pairs) for member in graph.stage_work}
    changed = dataclasses.replace(
        graph,
        outer=tuple(_around_loop(graph.outer, before, after)),
        stage_work=stage_work(eqns),
        accumulators=tuple(accumulators),
    )
    return ShardedGraph(changed, specs, sharded.gathered)


def _all_rewritten(
    graph: TaskGraph, allowed: Allowed, dimensions: Mapping[Var, ShardedDimensions], maker: PartialSumMaker
) -> dict[TaskType, RewrittenEqns]:
    """The rewritten equations of all work. Work that updates the same state agrees on its partial sums.

    Args:
      allowed: for the updated state of each accumulator, the axes along which it may be partial.
    """

    def rewritten(member: StageWork) -> RewrittenEqns:
        # A state that the function of a microbatch reads itself is no sum.
        sums = [a for a in graph.accumulators if a.work == member.work and not a.is_carry]
        targets = {a.updated: allowed[a.updated] for a in sums}
        carry = {a.state: a.updated for a in sums}
        return as_partial_sums(member.eqns, dimensions, targets, carry, [*member.makes, *targets], maker)

    while True:
        of_works = {member.work: rewritten(member) for member in graph.stage_work}
        axes: dict[Var, set[Axes | None]] = collections.defaultdict(set)
        for a in graph.accumulators:
            sums = of_works[a.work].partial.get(a.updated)
            axes[a.state].add(None if sums is None else sums.axes)
        split = {a.updated for a in graph.accumulators if len(axes[a.state]) > 1 and allowed[a.updated]}
        if not split:
            return of_works
        allowed = {**allowed, **dict.fromkeys(split, frozenset())}


def _live_eqns(
    member: StageWork, rewritten: RewrittenEqns, accumulators: Iterable[tuple[Accumulator, Accumulator]]
) -> Sequence[JaxprEqn]:
    """Returns the rewritten equations of a task that accumulators and other tasks need.

    Args:
      accumulators: pairs of a whole accumulator, and the accumulator of partial sums in its place, or the
        whole accumulator again.
    """
    if not rewritten.partial:
        return member.eqns
    updates = [(whole, new) for whole, new in accumulators if new.work == member.work]
    # Work that updates the same state reads the same variable.
    states = {rewritten.carry[whole.state].var: new.state for whole, new in updates if new is not whole}
    eqns = needed_eqns(rewritten.eqns, [*member.makes, *(new.updated for _, new in updates)])
    return [substitute(eqn, states) for eqn in eqns]


def _around_loop(
    outer: Iterable[JaxprEqn], before: Mapping[Var, Sequence[JaxprEqn]], after: Mapping[Var, JaxprEqn]
) -> Iterator[JaxprEqn]:
    """Yields the outer equations, with zeros for new accumulators and with sums before their readers.

    Args:
      before: by whole initial values, the equations that make their partial sums.
      after: by whole results, the equations that add partial sums up to them.
    """
    waiting = dict(after)
    for eqn in outer:
        for var in operands(eqn):
            if var in waiting:
                yield waiting.pop(var)
        yield eqn
        for var in eqn.outvars:
            yield from before.get(var, ())
    yield from waiting.values()
