"""Has accumulators hold partial sums, where the work that updates them can make these."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.graph import Accumulator, ShardedGraph, StageWork
from mpmd.compiler.jaxprs.equations import aval_of, free_variables, operands
from mpmd.compiler.jaxprs.sharded_dimensions import (
    ShardedDimensions,
    as_spec,
    axes_in,
    dimensions_of,
    follow,
    without,
)
from mpmd.compiler.request import PartialSums
from mpmd.compiler.shard.make_partial_sums import PartialSum, PartialSumMaker
from mpmd.compiler.shard.partial_sums import Allowed, RewrittenEqns, as_partial_sums, live_eqns
from mpmd.ir.plan import Spec


def with_partial_sums(
    sharded: ShardedGraph,
    submesh: AbstractMesh,
    outer: Mapping[Var, ShardedDimensions],
    axes_of_partial_sums: frozenset[str],
    partial_sums: PartialSums,
) -> ShardedGraph:
    """The graph with partial sums in accumulators.

    Args:
      outer: how values outside the loop are sharded, as far as known.
      axes_of_partial_sums: the mesh axes along which sums may be partial.
      partial_sums: ``"replicated"`` if they may not be so along those that shard the sum already.
    """
    graph = sharded.graph
    maker = PartialSumMaker(submesh)
    # 1. The work of each stage computes partial sums where it can.
    dimensions = follow((eqn for member in graph.stage_work for eqn in member.eqns), outer, submesh.shape)
    allowed = _allowed(sharded, axes_of_partial_sums, partial_sums)
    rewritten = [
        _rewritten(member, graph.accumulators, allowed, dimensions, maker) for member in graph.stage_work
    ]
    # 2. The accumulators that it updates by partial sums start from such, and are summed up after the loop.
    sums = {var: of for eqns in rewritten for var, of in (*eqns.partial.items(), *eqns.carry.items())}
    partial = {
        a.updated: _partial_accumulator(a, sums, sharded.specs, maker)
        for a in graph.accumulators
        if a.updated in sums
    }
    # 3. What is not needed any more goes, within the work and between works.
    stage_work = [
        _live_work(member, eqns, graph.accumulators)
        for member, eqns in zip(graph.stage_work, rewritten, strict=True)
    ]
    changed = dataclasses.replace(
        graph,
        outer=tuple(_around_loop(graph.outer, partial.values())),
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
    """The equations of a work that make partial sums of what it adds to accumulators.

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


def _live_work(member: StageWork, rewritten: RewrittenEqns, accumulators: Sequence[Accumulator]) -> StageWork:
    """The work with what its accumulators and other work need of the rewritten equations."""
    if not rewritten.partial:
        return member
    updated = [a.updated for a in accumulators if a.work == member.work]
    needed = [rewritten.partial[var].var if var in rewritten.partial else var for var in updated]
    return dataclasses.replace(member, eqns=live_eqns(rewritten.eqns, [*member.makes, *needed]))


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
    whole: Accumulator, sums: Mapping[Var, PartialSum], specs: Mapping[Var, Spec], maker: PartialSumMaker
) -> _PartialAccumulator:
    """An accumulator that its work updates by partial sums.

    Args:
      sums: the partial sums of states and updated states.
      specs: those of the whole sums.
    """
    axes = sums[whole.updated].axes
    before, initial = maker.as_first(whole.initial, axes)
    result = PartialSum(Var(aval_of(initial.var)), axes)
    new = dataclasses.replace(
        whole,
        state=sums[whole.state].var,
        updated=sums[whole.updated].var,
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
    """The outer equations, with those that start accumulators, and sum them up before they are read."""
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
    """The work with what it reads and makes, which may be less than before."""
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
