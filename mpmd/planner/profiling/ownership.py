"""Assigns a step's arguments to layers: weights, and the optimizer's state for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
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
    """The layers that a step's arguments and constants belong to.

    Attributes:
      batch: the arguments of which a microbatch is a part; they belong to no layer.
      sliced: the values outside of the loop, computed from the batch, that the loop slices.
      weights: the other values that layers read, with these layers.
      state: the arguments that the step updates and no layer reads, with the layer of the gradients that
        update them.
      casts: the values outside of the loop that are casts of a weight.
      like: the state that is combined with a weight element by element, such as its moments, with the weight.
    """

    batch: frozenset[Var]
    sliced: frozenset[Var]
    weights: Mapping[Var, tuple[int, ...]]
    state: Mapping[Var, int]
    like: Mapping[Var, Var]
    casts: Mapping[Var, tuple[Var, ...]] = dataclasses.field(default_factory=dict)

    def weights_of(self, layer: int) -> list[Var]:
        return [var for var, layers in self.weights.items() if layer in layers]


def ownership_of(graph: TaskGraph) -> Ownership:
    step = graph.step
    origins = _followed(graph.outer, {var: frozenset({var}) for var in step.inputs})
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
        casts=_casts(graph.outer, weights),
    )


def _casts(eqns: Iterable[JaxprEqn], weights: Collection[Var]) -> dict[Var, tuple[Var, ...]]:
    casts: dict[Var, tuple[Var, ...]] = {}
    for eqn in eqns:
        for var in operands(eqn) if eqn.primitive.name == "convert_element_type" else ():
            if var in weights:
                casts[var] = (*casts.get(var, ()), eqn.outvars[0])
    return casts


def _state(graph: TaskGraph, weights: Mapping[Var, Iterable[int]]) -> dict[Var, int]:
    step = graph.step
    layers = {a.result: frozenset({a.work.stage}) for a in graph.accumulators}
    layers |= {var: frozenset(of_var) for var, of_var in weights.items()}
    layers = _followed(graph.outer, layers)
    layer_of = {}
    for argument, result in step.fed_back:
        var = step.arguments[argument].var
        of_result = layers.get(step.results[result].var, NO_LAYERS)
        if var not in weights and of_result:
            layer_of[var] = min(of_result)
    return layer_of


def _followed(eqns: Iterable[JaxprEqn], known: Mapping[Var, frozenset[Any]]) -> dict[Var, frozenset[Any]]:
    """The labels of variables, extended to the results of equations.

    A result has the labels of its largest labelled operands. So a gradient that is scaled by the norm of all
    gradients still belongs to its layer.
    """
    extended = dict(known)
    for eqn in eqns:
        labelled = [var for var in operands(eqn) if extended.get(var)]
        largest = max(map(size, labelled), default=0)
        labels = frozenset().union(*(extended[var] for var in labelled if size(var) == largest))
        if labels:
            extended |= dict.fromkeys(eqn.outvars, labels)
    return extended


def nbytes(var: Var) -> int:
    """The bytes of a value; a random key counts the bytes of its integers."""
    return to_aval(var).nbytes
