"""Decides how values are sharded within a group, and which accumulators hold partial sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.graph import Accumulator, PartialSums, ShardedGraph, StageWork, TaskGraph
from mpmd.compiler.jaxprs.equations import aval_of, free_variables, operands, size
from mpmd.compiler.shard.dimensions import Axes, Dimensions, dimensions_of, follow
from mpmd.compiler.shard.infer_specs import infer_specs
from mpmd.compiler.shard.partial_sums import in_parts, live_eqns, without_calls
from mpmd.compiler.shard.parts import Parts, PartsMaker
from mpmd.ir import Spec


def shard(
    graph: TaskGraph,
    submeshes: Sequence[AbstractMesh],
    in_specs: Sequence[Spec] | None,
    out_specs: Sequence[Spec | None] | None,
    partial_sums: PartialSums,
) -> ShardedGraph:
    """The graph with what is known of shardings, and with sums that stay in parts until the loop has ended.

    Args:
      submeshes: the shape of each group's submesh. There are as many parts as devices along an axis, so only
        axes of the same size in all groups make parts.
      in_specs: how each argument is sharded; ``None``: all are replicated.
      out_specs: how each result is; ``None`` leaves it open.
      partial_sums: which accumulators may hold parts.
    """
    specs = infer_specs(graph, in_specs, out_specs)
    loop = graph.traced.loop
    if loop is None or partial_sums == "none" or not any(map(any, (in_specs or ()))):
        return ShardedGraph(graph, specs)
    submesh = submeshes[0]
    inlined = [without_calls(member.eqns) for member in graph.stage_work]
    dimensions = _dimensions(graph, inlined, specs, submesh)
    batch_axes = _batch_axes(loop.index, inlined, dimensions, submeshes)
    if not batch_axes:
        return ShardedGraph(graph, specs)
    taken = {
        a.updated: set() if partial_sums == "all" else _axes_of(specs[a.result]) for a in graph.accumulators
    }
    allowed = {updated: batch_axes - axes for updated, axes in taken.items()}
    return _with_partial_sums(graph, specs, submesh, inlined, dimensions, allowed)


def _with_partial_sums(
    graph: TaskGraph,
    specs: Mapping[Var, Spec],
    submesh: AbstractMesh,
    inlined: Sequence[Sequence[JaxprEqn]],
    dimensions: Mapping[Var, Dimensions],
    allowed: Mapping[Var, frozenset[str]],
) -> ShardedGraph:
    """The graph with partial sums along ``allowed`` axes in accumulators, given by their updated state."""
    known = dict(specs)
    maker = PartsMaker(submesh)
    parts: dict[Var, Parts] = {}  # by the accumulator's state or updated state
    stage_work: list[StageWork] = []
    for member, eqns in zip(graph.stage_work, inlined, strict=True):
        own = [a for a in graph.accumulators if a.work == member.work]
        wanted = {a.updated: allowed[a.updated] for a in own}
        carried = {a.state: a.updated for a in own}
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
            spec = _spec_of_parts(axes, specs[a.result])
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
    return ShardedGraph(changed, known)


def _dimensions(
    graph: TaskGraph,
    stage_eqns: Sequence[Sequence[JaxprEqn]],
    specs: Mapping[Var, Spec],
    submesh: AbstractMesh,
) -> dict[Var, Dimensions]:
    """How arguments are sharded and what is computed of them, outside the loop and by stages."""
    arguments = (argument.var for argument in graph.traced.arguments)
    known = {var: dimensions_of(specs[var], len(aval_of(var).shape)) for var in arguments}
    eqns = (*graph.outer, *(eqn for eqns in stage_eqns for eqn in eqns))
    return follow(eqns, known, submesh.shape)


def _batch_axes(
    index: Var,
    stage_eqns: Sequence[Sequence[JaxprEqn]],
    dimensions: Mapping[Var, Dimensions],
    submeshes: Sequence[AbstractMesh],
) -> frozenset[str]:
    """The mesh axes that shard a microbatch, those of the arrays that are read by the microbatch index.

    Axes of one device, or of different sizes in different groups, are left out.
    """
    eqns = [eqn for eqns in stage_eqns for eqn in eqns]
    made = {var for eqn in eqns for var in eqn.outvars}
    indices = {index}
    axes: set[str] = set()
    for eqn in eqns:
        if indices.isdisjoint(operands(eqn)):
            continue
        indices.update(var for var in eqn.outvars if size(var) == 1)
        for var in operands(eqn):
            if var not in made:
                axes.update(*dimensions.get(var, ()))
    sizes = {axis: {submesh.shape[axis] for submesh in submeshes} for axis in axes}
    return frozenset(axis for axis, found in sizes.items() if len(found) == 1 and found != {1})


def _axes_of(spec: Spec) -> set[str]:
    return {axis for axes in dimensions_of(spec, len(spec)) for axis in axes}


def _spec_of_parts(axes: Axes, spec: Spec) -> Spec:
    """The spec of parts of a sum with this spec: an axis that shards the parts shards nothing else."""
    rest = [tuple(a for a in entry if a not in axes) for entry in dimensions_of(spec, len(spec))]
    while rest and not rest[-1]:
        rest.pop()
    return tuple((entry[0] if len(entry) == 1 else entry) or None for entry in (axes, *rest))


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
