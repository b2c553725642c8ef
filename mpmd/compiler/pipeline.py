"""The compiler: its passes, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from mpmd.compiler.argument_specs import resolve
from mpmd.compiler.checks import (
    check_cut_step,
    check_placed_graph,
    check_sharded_graph,
    check_task_graph,
    check_traced_step,
)
from mpmd.compiler.cut_layers import cut_layers
from mpmd.compiler.find_layers.auto_marks import auto_marks
from mpmd.compiler.lower import lower
from mpmd.compiler.place import place
from mpmd.compiler.request import CompileRequest
from mpmd.compiler.shard import shard
from mpmd.compiler.split import split
from mpmd.compiler.steps import CutStep
from mpmd.compiler.trace import trace, warn_of_ignored_marks
from mpmd.ir.plan import Spec
from mpmd.language.decisions import with_layers_marked
from mpmd.program import Program
from mpmd.sharding import with_auto_axes
from mpmd.util.garbage import without_garbage_collection
from mpmd.util.stopwatch import Stopwatch
from mpmd.verify import Verified, verify

Inputs = ParamSpec("Inputs")
Level = TypeVar("Level")


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step that is ready to be loaded: the cut step, its program, and the program's proven properties.

    Attributes:
      in_specs: the specs of argument leaves for which the step was compiled; ``None``: all are replicated.
      seconds: the seconds of each pass, by its name; ``jax`` is JAX's tracing of the step itself.
    """

    step: CutStep
    in_specs: tuple[Spec | None, ...] | None
    program: Program
    verified: Verified
    seconds: Mapping[str, float]


@without_garbage_collection()
def compile_step(request: CompileRequest) -> CompiledStep:
    watch = Stopwatch()

    def run(
        compute: Callable[Inputs, Level], check: Callable[[Level], None] | None = None
    ) -> Callable[Inputs, Level]:
        def passed(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Level:
            with watch(compute.__name__):
                level = compute(*args, **kwargs)
                if check is not None:
                    check(level)
                return level

        return passed

    fun = with_layers_marked(request.fun, auto_marks)
    timed = dataclasses.replace(request, fun=watch.timed("jax", fun))
    submeshes = tuple(map(with_auto_axes, request.submeshes))

    traced = run(trace, check_traced_step)(timed)
    warn_of_ignored_marks(traced)
    cut = run(cut_layers, check_cut_step)(traced, request.argument_stacks, request.result_stacks)
    specs = resolve(request, cut)
    graph = run(split, check_task_graph)(cut)
    sharded = run(shard, check_sharded_graph)(
        graph, submeshes, specs, request.partial_sums, request.gather, request.sequence_parallel
    )
    placed = run(place, check_placed_graph)(sharded, submeshes, specs, request.parts)
    program = run(lower)(placed, submeshes, specs)
    verified = run(verify)(program.plan)
    return CompiledStep(placed.graph.step, specs.leaves, program, verified, watch.seconds)
