"""Has accumulators hold partial sums, where the work that updates them can make these."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.graph import Accumulator, ShardedGraph, StageWork, TaskGraph
from mpmd.compiler.jaxprs.equations import aval_of, free_variables, needed_eqns, operands, substitute
from mpmd.compiler.jaxprs.sharded_dimensions import (
    Axes,
    ShardedDimensions,
    as_spec,
    axes_in,
    dimensions_of,
    follow,
    without,
)
from mpmd.compiler.request import PartialSums
from mpmd.compiler.shard.make_partial_sums import PartialSum, PartialSumMaker
from mpmd.compiler.shard.partial_sums import Allowed, RewrittenEqns, as_partial_sums
from mpmd.ir.plan import Spec, TaskType


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
    allowed = _allowed(sharded, axes_of_partial_sums, partial_sums)
    rewritten = _all_rewritten(graph, allowed, dimensions, maker)
    # 2. The accumulators that it updates by partial sums start from such, and are summed up after the loop.
    partial = _partial_accumulators(graph, rewritten, sharded.specs, maker)
    # 3. What is not needed any more goes, within the work and between works.
    stage_work = [
        _live_work(member, rewritten[member.work], graph.accumulators, partial) for member in graph.stage_work
    ]
    changed = dataclasses.replace(
        graph,
        outer=tuple(_around_loop(graph.outer, list({a.new.state: a for a in partial.values()}.values()))),
        stage_work=_with_reads_and_makes(stage_work),
        accumulators=tuple(partial[a.updated].new if a.updated in partial else a for a in graph.accumulators),
    )
    specs = dict(sharded.specs)
    for accumulator in partial.values():
        specs |= accumulator.specs
    return ShardedGraph(changed, specs, sharded.gathered)


def _allowed(
    sharded: ShardedGraph, axes_of_partial_sums: frozenset[str], partial_sums: PartialSums
) -> dict[Var, frozenset[str]]:
    """For the updated state of each accumulator, the axes along which it may be partial."""
    if partial_sums == "all":
        return {a.updated: axes_of_partial_sums for a in sharded.graph.accumulators}
    return {
        a.updated: axes_of_partial_sums.difference(axes_in(_dimensions(a.result, sharded.specs)))
        for a in sharded.graph.accumulators
    }


def _dimensions(var: Var, specs: Mapping[Var, Spec]) -> ShardedDimensions:
    return dimensions_of(specs[var], len(aval_of(var).shape))


def _rewritten(
    member: StageWork,
    accumulators: Sequence[Accumulator],
    allowed: Allowed,
    dimensions: Mapping[Var, ShardedDimensions],
    maker: PartialSumMaker,
) -> RewrittenEqns:
    """Rewrites the equations of a work so that the sums that it adds to accumulators are partial.

    Args:
      allowed: for the updated state of each accumulator, the axes along which it may be partial.
    """
    # A state that the function of a microbatch reads itself is no sum.
    sums = [a for a in accumulators if a.work == member.work and not a.is_carry]
    allowed_sums = {a.updated: allowed[a.updated] for a in sums}
    updated_of = {a.state: a.updated for a in sums}
    return as_partial_sums(
        member.eqns, dimensions, allowed_sums, updated_of, [*member.makes, *allowed_sums], maker
    )


def _all_rewritten(
    graph: TaskGraph,
    allowed: Allowed,
    dimensions: Mapping[Var, ShardedDimensions],
    maker: PartialSumMaker,
) -> dict[TaskType, RewrittenEqns]:
    """The rewritten equations of all work. Work that updates the same state agrees on its partial sums."""
    allowed = dict(allowed)
    while True:
        rewritten = {
            member.work: _rewritten(member, graph.accumulators, allowed, dimensions, maker)
            for member in graph.stage_work
        }
        axes: dict[Var, set[Axes | None]] = collections.defaultdict(set)
        for a in graph.accumulators:
            sums = rewritten[a.work].partial
            axes[a.state].add(sums[a.updated].axes if a.updated in sums else None)
        split = {a.updated for a in graph.accumulators if len(axes[a.state]) > 1 and allowed[a.updated]}
        if not split:
            return rewritten
        allowed |= dict.fromkeys(split, frozenset())


def _partial_accumulators(
    graph: TaskGraph,
    rewritten: Mapping[TaskType, RewrittenEqns],
    specs: Mapping[Var, Spec],
    maker: PartialSumMaker,
) -> dict[Var, _PartialAccumulator]:
    """The accumulators of partial sums, by the updated states of the whole ones."""
    partial: dict[Var, _PartialAccumulator] = {}
    by_state: dict[Var, _PartialAccumulator] = {}
    for a in graph.accumulators:
        eqns = rewritten[a.work]
        if a.updated not in eqns.partial:
            continue
        first = by_state.get(a.state)
        if first is None:
            by_state[a.state] = partial[a.updated] = _partial_accumulator(a, eqns, specs, maker)
            continue
        updated = eqns.partial[a.updated].var
        new = dataclasses.replace(first.new, work=a.work, updated=updated)
        spec = {updated: first.specs[first.new.state]}
        partial[a.updated] = dataclasses.replace(first, whole=a, new=new, specs=spec)
    return partial


def _live_work(
    member: StageWork,
    rewritten: RewrittenEqns,
    accumulators: Sequence[Accumulator],
    partial: Mapping[Var, _PartialAccumulator],
) -> StageWork:
    """Returns the task with the rewritten equations that accumulators and other tasks need."""
    if not rewritten.partial:
        return member
    updates = [a for a in accumulators if a.work == member.work]
    needed = [partial[a.updated].new.updated if a.updated in partial else a.updated for a in updates]
    # Work that updates the same state reads the same variable.
    states = {
        rewritten.carry[a.state].var: partial[a.updated].new.state
        for a in updates
        if a.updated in partial and a.state in rewritten.carry
    }
    eqns = needed_eqns(rewritten.eqns, [*member.makes, *needed])
    return dataclasses.replace(member, eqns=tuple(substitute(eqn, states) for eqn in eqns))


@dataclasses.dataclass(frozen=True)
class _PartialAccumulator:
    """An accumulator of partial sums, in place of one of whole sums.

    Attributes:
      whole: the accumulator whose place it takes.
      new: itself.
      before: the equations that make its initial value of the whole one.
      after: the equation that makes the whole result of its own.
      specs: of its variables.
    """

    whole: Accumulator
    new: Accumulator
    before: Sequence[JaxprEqn]
    after: JaxprEqn
    specs: Mapping[Var, Spec]


def _partial_accumulator(
    whole: Accumulator, eqns: RewrittenEqns, specs: Mapping[Var, Spec], maker: PartialSumMaker
) -> _PartialAccumulator:
    """An accumulator that its work updates by partial sums.

    Args:
      eqns: the rewritten equations of its work.
      specs: the specs of the whole sums.
    """
    axes = eqns.partial[whole.updated].axes
    before, initial = maker.as_first(whole.initial, axes)
    result = PartialSum(Var(aval_of(initial.var)), axes)
    new = dataclasses.replace(
        whole,
        state=eqns.carry[whole.state].var,
        updated=eqns.partial[whole.updated].var,
        initial=initial.var,
        result=result.var,
    )
    # An axis that shards the partial sums shards nothing else.
    spec = as_spec((axes, *without(_dimensions(whole.result, specs), axes)))
    return _PartialAccumulator(
        whole=whole,
        new=new,
        before=before,
        after=maker.sum_up(result, whole.result),
        specs=dict.fromkeys((new.state, new.updated, new.initial, new.result), spec),
    )


def _around_loop(outer: Iterable[JaxprEqn], partial: Collection[_PartialAccumulator]) -> Iterable[JaxprEqn]:
    """Returns the outer equations, with zeros for new accumulators and with sums before their readers."""
    before = {accumulator.whole.initial: accumulator.before for accumulator in partial}
    waiting = {accumulator.whole.result: accumulator.after for accumulator in partial}
    for eqn in outer:
        for var in operands(eqn):
            if var in waiting:
                yield waiting.pop(var)
        yield eqn
        for var in eqn.outvars:
            yield from before.get(var, ())
    yield from waiting.values()


def _with_reads_and_makes(stage_work: Sequence[StageWork]) -> tuple[StageWork, ...]:
    """Returns the tasks with the variables that the rewritten equations read and make."""
    reads = [tuple(free_variables(member.eqns)) for member in stage_work]
    read_by_any = {var for variables in reads for var in variables}
    return tuple(
        dataclasses.replace(
            member,
            reads=variables,
            makes=tuple(var for eqn in member.eqns for var in eqn.outvars if var in read_by_any),
        )
        for member, variables in zip(stage_work, reads, strict=True)
    )
