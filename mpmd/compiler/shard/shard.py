"""Decides how values are sharded within a group, and which are gathered or summed up once per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend.core import Var
from jax.sharding import AbstractMesh

from mpmd.compiler.argument_specs import ArgumentSpecs
from mpmd.compiler.graph import ShardedGraph, TaskGraph
from mpmd.compiler.jaxprs.sharded_dimensions import ShardedDimensions, follow
from mpmd.compiler.request import Gather, PartialSums, SequenceParallel
from mpmd.compiler.shard.gather import gather_weights
from mpmd.compiler.shard.infer_specs import infer_specs
from mpmd.compiler.shard.microbatch_dimensions import microbatch_dimensions, with_rows_sharded
from mpmd.compiler.shard.partial_accumulators import with_partial_sums
from mpmd.compiler.shard.reads import loop_reads
from mpmd.compiler.shard.sequence_parallel import with_residuals_sharded
from mpmd.ir.specs import axes_of


def shard(
    graph: TaskGraph,
    submeshes: Sequence[AbstractMesh],
    specs: ArgumentSpecs,
    partial_sums: PartialSums = "replicated",
    gather: Gather = "task",
    sequence_parallel: SequenceParallel | None = None,
) -> ShardedGraph:
    """Returns the graph with the known specs, and with weights gathered and sums added up once per step.

    Args:
      submeshes: the shape of each group's submesh. There are as many partial sums as devices along an
        axis, so only axes of the same size in all groups make any.
      specs: how arguments and results are sharded.
      partial_sums: which accumulators may hold partial sums.
      gather: when weights that are sharded over the batch's axes are gathered.
      sequence_parallel: how values between tensor-parallel regions are sharded; ``None``: as XLA chooses.
    """
    graph, inferred = infer_specs(graph, specs)
    sharded = ShardedGraph(graph, inferred, {})
    if not graph.step.loops or not any(map(any, specs.arguments)):
        return sharded
    reads = loop_reads(graph)
    whole = microbatch_dimensions(graph.outer, reads.dimensions)
    outer = _outer_dimensions(sharded, submeshes[0], whole)
    sharded = dataclasses.replace(sharded, graph=with_rows_sharded(graph, outer, whole, submeshes))
    if sequence_parallel is not None:
        accumulators = {a.state: sharded.dimensions(a.state) for a in graph.accumulators}
        rewritten = with_residuals_sharded(
            sharded.graph, sequence_parallel, {**outer, **accumulators}, whole, submeshes
        )
        sharded = dataclasses.replace(sharded, graph=rewritten)
    batch_axes = {axis for var in reads.by_index for axis in axes_of(outer.get(var, ()))}
    if gather == "step":
        sharded = gather_weights(sharded, outer, batch_axes, submeshes, reads.by_index | reads.by_device)
        outer |= {var: sharded.dimensions(var) for var in sharded.gathered}
    axes_of_partial_sums = frozenset(axis for axis in batch_axes if _divides_sums(axis, submeshes))
    if partial_sums == "none" or not axes_of_partial_sums:
        return sharded
    return with_partial_sums(sharded, submeshes[0], outer, axes_of_partial_sums, partial_sums)


def _outer_dimensions(
    sharded: ShardedGraph, submesh: AbstractMesh, whole: Mapping[Var, int]
) -> dict[Var, ShardedDimensions]:
    arguments = (argument.var for argument in sharded.graph.step.arguments)
    known = {var: sharded.dimensions(var) for var in arguments}
    return follow(sharded.graph.outer, known, submesh.shape, whole)


def _divides_sums(axis: str, submeshes: Sequence[AbstractMesh]) -> bool:
    sizes = {submesh.shape[axis] for submesh in submeshes}
    return len(sizes) == 1 and sizes != {1}
