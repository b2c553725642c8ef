"""Spreads the specs of arguments and results to accumulators and to other values outside the loop.

So a weight's gradient accumulator gets the spec of the weight, and so does state that the step makes itself.
State that is passed in does not: like any argument, Adam's moments keep the spec of the caller or of the
passed array, and are replicated without one. Only ``mpmd.plan`` gives them the spec of their weight
(``planner/trials/shardings.py``). Where an equation combines values with different specs, such as a weight
and moments without a spec, the values computed between the two, such as the accumulator, are replicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.argument_specs import ArgumentSpecs
from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.jaxprs.elementwise import elementwise_classes
from mpmd.compiler.jaxprs.equations import shape_of
from mpmd.compiler.jaxprs.traced import copy_of
from mpmd.compiler.steps import Result
from mpmd.ir.plan import Spec
from mpmd.ir.specs import dimensions_of


def infer_specs(graph: TaskGraph, specs: ArgumentSpecs) -> tuple[TaskGraph, dict[Var, Spec]]:
    """Infers the specs of outer values and of accumulators.

    A result without a requested spec is sharded like the argument that the next step passes in its place.

    Returns: the graph with a copy for each result whose spec differs from the spec of its variable; and the
      known specs, including the specs of explicitly sharded types.
    """
    graph, asked = _with_results_apart(graph, specs)
    step = graph.step
    fed_back = {step.results[j].var: specs.arguments[i] for i, j in reversed(step.fed_back)}
    constants: dict[Var, Spec] = dict.fromkeys(step.constants, ())
    inferred = _spread(graph.outer, {**fed_back, **step.explicit_specs, **constants, **asked})
    for a in graph.accumulators:
        # An accumulator has the same spec before and after each update.
        inferred |= dict.fromkeys((a.initial, a.state, a.updated, a.result), inferred.get(a.result, ()))
    return graph, {**step.explicit_specs, **inferred}


def _with_results_apart(graph: TaskGraph, specs: ArgumentSpecs) -> tuple[TaskGraph, dict[Var, Spec]]:
    step = graph.step
    known = dict(zip((argument.var for argument in step.arguments), specs.arguments, strict=True))
    copies: list[JaxprEqn] = []
    results: list[Result] = []
    for result, spec in zip(step.results, specs.results, strict=True):
        var = result.var
        if spec is not None and not _are_alike(var, known.setdefault(var, spec), spec):
            copies.append(copy_of(var))
            (var,) = copies[-1].outvars
            known[var] = spec
        results.append(dataclasses.replace(result, var=var))
    outside = (*step.outside[:-1], (*step.outside[-1], *copies))
    apart = dataclasses.replace(step, outside=outside, results=tuple(results))
    return dataclasses.replace(graph, step=apart, outer=(*graph.outer, *copies)), known


def _are_alike(var: Var, spec: Spec, other: Spec) -> bool:
    rank = len(shape_of(var))
    return dimensions_of(spec, rank) == dimensions_of(other, rank)


def _spread(eqns: Sequence[JaxprEqn], decided: Mapping[Var, Spec]) -> dict[Var, Spec]:
    """Extends specs through elementwise equations, among values of the same shape.

    So the gradient accumulators of a weight, and values computed from the accumulators, are sharded like the
    weight: an optimizer combines their elements one by one. A decided spec stays. Where two specs meet, such
    as the specs of a weight and of moments that are sharded otherwise, neither spreads.
    """
    classes = elementwise_classes(eqns)
    specs_of: dict[Var, set[Spec]] = {}
    for var, spec in decided.items():
        specs_of.setdefault(classes.get(var, var), set()).add(spec)
    inferred = {
        var: next(iter(specs_of[leader]))
        for var, leader in classes.items()
        if len(specs_of.get(leader, ())) == 1
    }
    return {**inferred, **decided}
