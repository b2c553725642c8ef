"""A step without a loop, as one layer: only how the devices of one group share it is left to choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from jax.extend.core import Var

from mpmd.compiler.graph import StageWork, TaskGraph
from mpmd.compiler.jaxprs.equations import aval_of
from mpmd.compiler.jaxprs.flat import FlatEquations
from mpmd.ir.plan import TaskType
from mpmd.planner.profiling.choose_classes import choose_classes
from mpmd.planner.profiling.layered_step import LayeredLoop, LayeredStep, with_classes
from mpmd.planner.profiling.microbatch import MicrobatchDim
from mpmd.planner.profiling.ownership import Ownership

_WORK = TaskType("fwd", 0)


def whole_step(graph: TaskGraph, flash_attention: bool) -> LayeredStep:
    """The step as one task, which takes the whole batch.

    The arguments that the step returns updated are its weights, and the remaining arguments its batch. In a
    function that updates nothing, the batch is the argument whose dimension shards most of the work with
    the least all-reduce traffic, since rows do not depend on one another.
    """
    whole = graph.step
    updated = {whole.arguments[argument].var for argument, _ in whole.fed_back}
    step = _step(graph, updated, flash_attention)
    if updated:
        return step
    rows = choose_classes(step, {_WORK: ()})["data"]
    with_rows = {dim.batch for dim in step.loops[0].microbatch if step.classes.of(dim.value, dim.dim) in rows}
    weights = {argument.var for argument in whole.arguments} - with_rows
    return _step(graph, weights, flash_attention)


def _step(graph: TaskGraph, weights: Collection[Var], flash_attention: bool) -> LayeredStep:
    whole = graph.step
    arguments = [argument.var for argument in whole.arguments]
    batch = [var for var in arguments if var not in weights]
    results = tuple(dict.fromkeys(result.var for result in whole.results))
    task = StageWork(_WORK, graph.outer, reads=tuple(whole.inputs), makes=results)
    flat = FlatEquations(flash_attention=flash_attention)
    tasks = {_WORK: flat.add(graph.outer)}
    dims = [
        MicrobatchDim(var, dim, flat.value(var), dim, size)
        for var in batch
        for dim, size in enumerate(aval_of(var).shape)
        if size > 1
    ]
    ownership = Ownership(
        batch=frozenset(batch),
        sliced=frozenset(batch),
        weights={var: (0,) for var in arguments if var in weights},
        state={},
        like={},
    )
    loop = LayeredLoop(range(1), dims, num_microbatches=1, decision_index=0)
    graph = dataclasses.replace(graph, outer=(), stage_work=(task,))
    return with_classes(graph, ownership, flat, tasks, (), [loop])
