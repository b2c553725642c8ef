"""Which arguments of a step belong to which layer: its weights, and what the optimizer keeps for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.jaxprs.elementwise import elementwise_classes
from mpmd.compiler.jaxprs.equations import operands, size
from mpmd.compiler.shard.reads import loop_reads
from mpmd.keys import to_aval

NO_LAYERS: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Ownership:
    """What of a step's arguments and constants belongs to layers.

    Attributes:
      batch: of which a microbatch is a part.
      sliced: the values outside of the loop, made of these, of which the loop takes the part.
      weights: what layers read besides, with the layers.
      state: what the step updates and no layer reads, with the layer whose gradients go into it.
      like: the state that is combined element by element with a weight, such as its moments, with the weight.
    """

    batch: frozenset[Var]
    sliced: frozenset[Var]
    weights: Mapping[Var, tuple[int, ...]]
    state: Mapping[Var, int]
    like: Mapping[Var, Var]

    def weights_of(self, layer: int) -> list[Var]:
        """The weights that a layer reads."""
        return [var for var, layers in self.weights.items() if layer in layers]


def ownership_of(graph: TaskGraph) -> Ownership:
    """What belongs to layers, each of which is a stage of the graph."""
    step = graph.step
    given = {a.var for a in step.arguments} | {c.var for c in step.constants}
    origins = _followed(graph.outer, {var: frozenset({var}) for var in given})
    sliced = frozenset(loop_reads(graph).by_index)
    batch = frozenset().union(*(origins.get(var, ()) for var in sliced))
    weights: dict[Var, set[int]] = {}
    for member in graph.stage_work:
        for read in member.reads:
            for var in origins.get(read, ()):
                if var not in batch:
                    weights.setdefault(var, set()).add(member.work.stage)
    together = elementwise_classes(graph.outer)
    of_weight = {together.get(var, var): var for var in weights}
    state = _state(graph, weights)
    like = {var: of_weight[together[var]] for var in state if together.get(var) in of_weight}
    return Ownership(
        batch=batch,
        sliced=sliced,
        weights={var: tuple(sorted(layers)) for var, layers in weights.items()},
        state=state,
        like=like,
    )


def _state(graph: TaskGraph, weights: Mapping[Var, Iterable[int]]) -> dict[Var, int]:
    """What the step updates with the gradients of layers, and no layer reads."""
    step = graph.step
    layers = {a.result: frozenset({a.work.stage}) for a in graph.accumulators}
    layers |= {var: frozenset(of_var) for var, of_var in weights.items()}
    layers = _followed(graph.outer, layers)
    found = {}
    for argument, result in step.carried_state:
        var = step.arguments[argument].var
        of_result = layers.get(step.results[result].var, NO_LAYERS)
        if var not in weights and of_result:
            found[var] = min(of_result)
    return found


def _followed(eqns: Iterable[JaxprEqn], known: Mapping[Var, frozenset[Any]]) -> dict[Var, frozenset[Any]]:
    """Labels of variables, extended by the results of equations.

    A result has the labels of its largest labelled operands. So a gradient that is scaled by the norm of all
    gradients still belongs to its layer.
    """
    found = dict(known)
    for eqn in eqns:
        labelled = [var for var in operands(eqn) if found.get(var)]
        largest = max(map(size, labelled), default=0)
        labels = frozenset().union(*(found[var] for var in labelled if size(var) == largest))
        if labels:
            found |= dict.fromkeys(eqn.outvars, labels)
    return found


def nbytes(var: Var) -> int:
    """The bytes of a value; keys are the integers inside."""
    return to_aval(var).nbytes
