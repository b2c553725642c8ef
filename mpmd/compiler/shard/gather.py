"""Has weights that are sharded over the batch's axes gathered once per step, before the loop.

A task that multiplies its share of a microbatch with such a weight gathers the weight first: in every
microbatch, and in the backward again. Here tasks read a copy instead, whose spec has none of the batch's
axes, so the equation before the loop that makes the copy is the only one to gather. The sharded weight stays
for what reads it outside the loop. Each group whose tasks read a weight makes its own copy (see ``place``),
and frees the copy after the last task that reads it.

The batch is not gathered, and neither is an operand of a ``shard_map``, whose function gathers by itself.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence, Set

from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.graph import ShardedGraph, TaskGraph, stage_work
from mpmd.compiler.jaxprs.equations import substitute
from mpmd.compiler.jaxprs.sharded_dimensions import ShardedDimensions, as_spec, without
from mpmd.compiler.jaxprs.traced import copy_of
from mpmd.ir.specs import axes_of


def gather_weights(
    sharded: ShardedGraph,
    dimensions: Mapping[Var, ShardedDimensions],
    axes: Set[str],
    submeshes: Sequence[AbstractMesh],
    left: Set[Var],
) -> ShardedGraph:
    """Returns the graph with tasks that read gathered copies of sharded weights.

    Args:
      dimensions: the known shardings of outer values.
      axes: the mesh axes along which values are gathered.
      submeshes: the submeshes of all groups.
      left: the values that stay sharded.
    """
    graph, specs = sharded.graph, dict(sharded.specs)
    gathered: dict[Var, Var] = {}
    eqns: list[JaxprEqn] = []
    for var, gathered_axes in _axes_to_gather(graph, dimensions, axes, submeshes).items():
        if gathered_axes and var not in left:
            eqns.append(copy_of(var))
            (gathered[var],) = eqns[-1].outvars
            specs[gathered[var]] = as_spec(without(dimensions[var], gathered_axes))
    changed = dataclasses.replace(
        graph,
        outer=(*graph.outer, *eqns),
        stage_work=stage_work(
            {member.work: [substitute(eqn, gathered) for eqn in member.eqns] for member in graph.stage_work}
        ),
    )
    return ShardedGraph(changed, specs, {copy: var for var, copy in gathered.items()})


def _axes_to_gather(
    graph: TaskGraph,
    dimensions: Mapping[Var, ShardedDimensions],
    axes: Set[str],
    submeshes: Sequence[AbstractMesh],
) -> Mapping[Var, Set[str]]:
    submesh_of = {
        task.stage: submesh
        for tasks in graph.tasks
        for submesh, cells in zip(submeshes, tasks, strict=False)
        for cell in cells
        for task in cell.tasks
    }
    gathered: dict[Var, set[str]] = collections.defaultdict(set)
    for member in graph.stage_work:
        if (submesh := submesh_of.get(member.work.stage)) is None:
            continue  # place refuses a schedule with more groups than there are
        for var in member.reads:
            sharding = axes_of(dimensions.get(var, ()))
            gathered[var] |= {axis for axis in sharding & axes if submesh.shape[axis] > 1}
    return gathered
