"""The compiler: its passes, one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh

from mpmd.compiler.checks import (
    check_placed_graph,
    check_sharded_graph,
    check_task_graph,
    check_traced_step,
)
from mpmd.compiler.graph import Gather, PartialSums, TracedStep
from mpmd.compiler.lower import lower
from mpmd.compiler.place import check_specs, place
from mpmd.compiler.shard import shard
from mpmd.compiler.split import split
from mpmd.compiler.trace import trace
from mpmd.ir import Spec
from mpmd.program import Program
from mpmd.stopwatch import Stopwatch
from mpmd.verify import Verified, verify


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step that is ready to be loaded: what was traced, the program, and what was proven of it.

    ``seconds`` has how long each pass took; ``jax`` is the step itself, as JAX traces it.
    """

    traced: TracedStep
    program: Program
    verified: Verified
    seconds: Mapping[str, float]


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turns garbage collection off: each collection would visit every equation and free none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def compile_step(
    fun: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    submeshes: Sequence[AbstractMesh],
    donated: Sequence[bool],
    in_specs: Sequence[Spec] | None = None,
    out_specs: Callable[[Any], Sequence[Spec | None]] | None = None,
    partial_sums: PartialSums = "replicated",
    gather: Gather = "task",
) -> CompiledStep:
    """Compiles a step for groups of devices.

    Args:
      fun: the step; static arguments are bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.
      submeshes: the shape of each group's submesh; all have the same axes.
      donated: for each argument leaf, whether the caller gives it up.
      in_specs: for each argument leaf how it is sharded within a group; ``None``: everything is replicated.
      out_specs: the same for result leaves, given the shape of the result; those that are ``None`` are left
        to the compiler.
      partial_sums: which accumulators may hold partial sums over the devices of a group.
      gather: when weights that are sharded over the batch's axes are gathered.

    Raises: ``CompileError``.
    """
    watch = Stopwatch()
    with watch("trace"):
        traced = trace(watch.timed("jax", fun), args, dict(kwargs), submeshes)
        check_traced_step(traced)
        given = out_specs(traced.out_shape) if out_specs else None
    with watch("split"):
        graph = split(traced)
        check_task_graph(graph)
    with watch("shard"):
        sharded = shard(graph, submeshes, in_specs, given, partial_sums, gather)
        check_sharded_graph(sharded)
    with watch("place"):
        placed = place(sharded, len(submeshes))
        check_placed_graph(placed)
        check_specs(placed, submeshes, in_specs, given)
    with watch("lower"):
        open_specs = in_specs is not None or given is not None
        program = lower(placed, submeshes, donated, open_specs)
    with watch("verify"):
        verified = verify(program.plan)
    return CompiledStep(traced, program, verified, watch.seconds)
