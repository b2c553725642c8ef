"""Names of layers for tables and messages."""

from __future__ import annotations

import collections

from mpmd.compiler.jaxprs.source import line_of
from mpmd.ir.plan import TaskType
from mpmd.planner.profiling.layered_step import LayeredStep
from mpmd.util.tables import first_few, group_leaves


def layer_names(step: LayeredStep) -> list[str]:
    layers_of = {
        argument.path: step.ownership.weights.get(argument.var, ()) for argument in step.graph.step.arguments
    }
    weights: dict[int, list[str]] = collections.defaultdict(list)
    for name, paths in group_leaves(layers_of):
        for layer in layers_of[paths[0]]:
            weights[layer].append(name)
    eqns = {one.work: one.eqns for one in step.graph.stage_work}
    names = []
    for layer in range(step.num_layers):
        lines = (line_of(eqn) for eqn in reversed(eqns.get(TaskType("fwd", layer), ())))
        line = next(filter(None, lines), None)
        of_layer = first_few(weights[layer]) or "no weights"
        names.append(f"{of_layer} to {line}" if line else of_layer)
    return names
