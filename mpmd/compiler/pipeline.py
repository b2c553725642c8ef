"""The compiler: its passes, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh

from mpmd.compiler.checks import (
    check_cut_step,
    check_placed_graph,
    check_sharded_graph,
    check_task_graph,
    check_traced_step,
)
from mpmd.compiler.cut_layers import cut_layers
from mpmd.compiler.graph import Gather, PartialSums
from mpmd.compiler.lower import lower
from mpmd.compiler.place import check_specs, place
from mpmd.compiler.shard import argument_specs, fitting_parts, shard, with_results_apart
from mpmd.compiler.split import split
from mpmd.compiler.steps import CutStep
from mpmd.compiler.trace import trace
from mpmd.ir.placement import ANYWHERE, Placement
from mpmd.ir.plan import Spec
from mpmd.ir.stack import Leaf, per_part
from mpmd.program import Program
from mpmd.sharding import with_auto_axes
from mpmd.util.garbage import without_garbage_collection
from mpmd.util.stopwatch import Stopwatch
from mpmd.verify import Verified, verify


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step that is ready to be loaded: what was traced, the program, and what was proven of it.

    Attributes:
      in_specs: those of argument leaves for which it was compiled; ``None``: all are replicated.
      seconds: how long each pass took; ``jax`` is the step itself, as JAX traces it.
    """

    step: CutStep
    in_specs: tuple[Spec | None, ...] | None
    program: Program
    verified: Verified
    seconds: Mapping[str, float]


def _of_parts(leaves: Sequence[Leaf], placements: Sequence[Placement] | None) -> list[Placement]:
    """Where each part is of leaves, if they are there in these parts."""
    found: list[Placement] = []
    for leaf, placement in zip(leaves, placements or [ANYWHERE] * len(leaves), strict=True):
        there = placement if placement.stack == leaf.stack else ANYWHERE
        found += there.parts if there.stack else [there] * len(leaf.names)
    return found


@without_garbage_collection()
def compile_step(
    fun: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    submeshes: Sequence[AbstractMesh],
    donated: Sequence[bool],
    in_specs: Sequence[Spec | None] | None = None,
    own_specs: Sequence[bool] | None = None,
    out_specs: Callable[[Any], Sequence[Spec | None]] | None = None,
    partial_sums: PartialSums = "replicated",
    gather: Gather = "task",
    held: Sequence[Placement] | None = None,
    wanted: Sequence[Placement] | None = None,
) -> CompiledStep:
    """Compiles a step for groups of devices.

    Args:
      fun: the step; static arguments are bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.
      submeshes: the shape of each group's submesh; all have the same axes.
      donated: for each argument leaf, whether the caller gives it up.
      in_specs: for each argument leaf how it is sharded within a group; ``None`` for one, or for all:
        replicated.
      own_specs: for each argument leaf, whether its spec is that of the array that is passed, rather than one
        that the caller asks for: it is replicated where that does not fit the parts that it is in.
      out_specs: the same for result leaves, given the shape of the result; those that are ``None`` are left
        to the compiler.
      partial_sums: which accumulators may hold partial sums over the devices of a group.
      gather: when weights that are sharded over the batch's axes are gathered.
      held: for a function without a loop, where each argument leaf is already; ``ANYWHERE`` for one that
        the caller sends. One without a spec in ``in_specs`` has the spec that it is held with, and one that
        is held in parts is read in these parts.
      wanted: for a function without a loop, where each result leaf is to be, and in which parts;
        ``ANYWHERE``: where it is made. Their specs are those of ``out_specs``.

    Raises: ``CompileError``.
    """
    watch = Stopwatch()
    with watch("trace"):
        check_traced_step(
            traced := trace(watch.timed("jax", fun), args, dict(kwargs), submeshes, in_specs, held, donated)
        )
    with watch("cut_layers"):
        cut = cut_layers(traced, [p.stack for p in held or ()], [p.stack for p in wanted or ()])
        check_cut_step(cut)
        submeshes = [with_auto_axes(submesh) for submesh in submeshes]
        arguments, results = cut.argument_leaves, cut.result_leaves
        donated = per_part(arguments, donated)
        leaf_specs = in_specs = fitting_parts(arguments, in_specs, own_specs, submeshes)
        in_specs = None if in_specs is None else per_part(arguments, in_specs)
        given = per_part(results, out_specs(cut.out_shape)) if out_specs else None
        held = _of_parts(arguments, held)
        wanted = _of_parts(results, wanted)
        if not cut.loops:
            in_specs = argument_specs(cut, submeshes, in_specs, given, held)
        specs = None if in_specs is None else [spec or () for spec in in_specs]
        cut = with_results_apart(cut, specs, given)
    with watch("split"):
        graph = split(cut)
        check_task_graph(graph)
    with watch("shard"):
        sharded = shard(graph, submeshes, specs, given, partial_sums, gather)
        check_sharded_graph(sharded)
    with watch("place"):
        if not cut.loops:
            there = [frozenset(placement.mpmd_idxs) for placement in held]
            asked = [frozenset(placement.mpmd_idxs) for placement in wanted]
            placed = place(sharded, submeshes, there, asked)
        else:
            placed = place(sharded, submeshes, donated=donated)
        check_placed_graph(placed)
        check_specs(placed, submeshes, specs, given)
    with watch("lower"):
        open_specs = specs is not None or given is not None or any(cut.typed.values())
        program = lower(placed, submeshes, donated, open_specs)
    with watch("verify"):
        verified = verify(program.plan)
    return CompiledStep(cut, leaf_specs, program, verified, watch.seconds)
