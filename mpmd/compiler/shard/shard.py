"""Decides how values are sharded within a group, and what is gathered or summed up once per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.graph import Accumulator, Gather, PartialSums, ShardedGraph, StageWork, TaskGraph
from mpmd.compiler.jaxprs.dimensions import Dimensions, as_spec, axes_in, dimensions_of, follow, without
from mpmd.compiler.jaxprs.equations import aval_of, free_variables, operands
from mpmd.compiler.shard.gather import gather_weights
from mpmd.compiler.shard.infer_specs import infer_specs
from mpmd.compiler.shard.microbatch_dimensions import microbatch_dimensions, with_rows_sharded
from mpmd.compiler.shard.partial_sums import in_parts, live_eqns, without_calls
from mpmd.compiler.shard.parts import Parts, PartsMaker
from mpmd.compiler.shard.reads import loop_reads
from mpmd.ir.plan import Spec


def shard(
    graph: TaskGraph,
    submeshes: Sequence[AbstractMesh],
    in_specs: Sequence[Spec] | None,
    out_specs: Sequence[Spec | None] | None,
    partial_sums: PartialSums,
    gather: Gather,
) -> ShardedGraph:
    """The graph with what is known of shardings, and with what is gathered or summed up once per step.

    Args:
      submeshes: the shape of each group's submesh. There are as many parts as devices along an axis, so only
        axes of the same size in all groups make parts.
      in_specs: how each argument is sharded; ``None``: all are replicated.
      out_specs: how each result is; ``None`` leaves it open.
      partial_sums: which accumulators may hold parts.
      gather: when weights that are sharded over the batch's axes are gathered.
    """
    sharded = ShardedGraph(graph, infer_specs(graph, in_specs, out_specs), {})
    if not graph.step.loops or not any(map(any, (in_specs or ()))):
        return sharded
    reads = loop_reads(graph)
    whole = microbatch_dimensions(graph.outer, reads.dimensions)
    outer = _outer_dimensions(sharded, submeshes[0], whole)
    sharded = dataclasses.replace(sharded, graph=with_rows_sharded(graph, outer, whole, submeshes))
    batch_axes = {axis for var in reads.by_index for axis in axes_in(outer.get(var, ()))}
    if gather == "step":
        sharded = gather_weights(sharded, outer, batch_axes, submeshes, reads.by_index | reads.by_device)
        outer |= {var: _dimensions(var, sharded.specs) for var in sharded.gathered}
    axes_of_parts = frozenset(axis for axis in batch_axes if _makes_parts(axis, submeshes))
    if partial_sums == "none" or not axes_of_parts:
        return sharded
    return _with_partial_sums(sharded, submeshes[0], outer, axes_of_parts, partial_sums)


def _outer_dimensions(
    sharded: ShardedGraph, submesh: AbstractMesh, whole: Mapping[Var, int]
) -> dict[Var, Dimensions]:
    """How arguments are sharded and what is computed of them outside the loop, as far as known.

    Args:
      whole: for values the dimension that counts microbatches, along which they are not sharded.
    """
    arguments = (argument.var for argument in sharded.graph.step.arguments)
    known = {var: _dimensions(var, sharded.specs) for var in arguments}
    return follow(sharded.graph.outer, known, submesh.shape, whole)


def _dimensions(var: Var, specs: Mapping[Var, Spec]) -> Dimensions:
    return dimensions_of(specs[var], len(aval_of(var).shape))


def _makes_parts(axis: str, submeshes: Sequence[AbstractMesh]) -> bool:
    """Whether all groups have the same number of devices along an axis, and several."""
    sizes = {submesh.shape[axis] for submesh in submeshes}
    return len(sizes) == 1 and sizes != {1}


def _with_partial_sums(
    sharded: ShardedGraph,
    submesh: AbstractMesh,
    outer: Mapping[Var, Dimensions],
    axes_of_parts: frozenset[str],
    partial_sums: PartialSums,
) -> ShardedGraph:
    """The graph with partial sums in accumulators.

    Args:
      outer: how values outside the loop are sharded, as far as known.
      axes_of_parts: the mesh axes along which sums may be in parts.
    """
    graph, specs = sharded.graph, sharded.specs
    inlined = [without_calls(member.eqns) for member in graph.stage_work]
    dimensions = follow((eqn for eqns in inlined for eqn in eqns), outer, submesh.shape)
    sharding = {a.updated: axes_in(_dimensions(a.result, specs)) for a in graph.accumulators}
    taken = sharding if partial_sums == "replicated" else {}
    allowed = {updated: axes_of_parts.difference(taken.get(updated, ())) for updated in sharding}
    known = dict(specs)
    maker = PartsMaker(submesh)
    parts: dict[Var, Parts] = {}  # by the accumulator's state or updated state
    stage_work: list[StageWork] = []
    for member, eqns in zip(graph.stage_work, inlined, strict=True):
        own = [a for a in graph.accumulators if a.work == member.work]
        wanted = {a.updated: allowed[a.updated] for a in own if not a.carried}
        carried = {a.state: a.updated for a in own if not a.carried}
        rewritten = in_parts(eqns, dimensions, wanted, carried, [*member.makes, *wanted], maker)
        parts |= {**rewritten.parts, **rewritten.carried}
        if rewritten.parts:
            needed = [parts[a.updated].var if a.updated in parts else a.updated for a in own]
            live = live_eqns(rewritten.eqns, [*member.makes, *needed])
            member = dataclasses.replace(member, eqns=live)
        stage_work.append(member)
    in_order: list[Accumulator] = []
    before: dict[Var, list[JaxprEqn]] = {}
    after: dict[Var, JaxprEqn] = {}
    for a in graph.accumulators:
        if a.updated in parts:
            axes = parts[a.updated].axes
            before[a.initial], initial = maker.first_part(a.initial, axes)
            result = Parts(Var(aval_of(initial.var)), axes)
            after[a.result] = maker.sum_up(result, a.result)
            # An axis that shards the parts shards nothing else.
            spec = as_spec((axes, *without(_dimensions(a.result, specs), axes)))
            a = dataclasses.replace(
                a,
                state=parts[a.state].var,
                updated=parts[a.updated].var,
                initial=initial.var,
                result=result.var,
            )
            known |= dict.fromkeys((a.state, a.updated, a.initial, a.result), spec)
        in_order.append(a)
    changed = dataclasses.replace(
        graph,
        outer=tuple(_around_loop(graph.outer, before, after)),
        stage_work=_with_reads_and_makes(stage_work),
        accumulators=tuple(in_order),
    )
    return ShardedGraph(changed, known, sharded.gathered)


def _around_loop(
    outer: Iterable[JaxprEqn], before: Mapping[Var, Sequence[JaxprEqn]], after: Mapping[Var, JaxprEqn]
) -> Iterable[JaxprEqn]:
    """The outer equations, with others after those that make certain values, or before what reads others."""
    waiting = dict(after)
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
    read = {var for variables in reads for var in variables}
    return tuple(
        dataclasses.replace(
            member,
            reads=own,
            makes=tuple(var for eqn in member.eqns for var in eqn.outvars if var in read),
        )
        for member, own in zip(stage_work, reads, strict=True)
    )
