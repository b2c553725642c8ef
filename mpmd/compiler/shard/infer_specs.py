"""Spreads the specs of arguments and results to accumulators and to other values outside the loop.

So a weight's gradient accumulator gets the spec of the weight, and so does state that the step makes itself.
State that is passed in does not: like any argument, Adam's moments keep the spec of the caller or of the
passed array, and are replicated without one. Only ``mpmd.plan`` gives them the spec of their weight
(``planner/trials/shardings.py``). Where an equation combines values with different specs, such as a weight
and moments without a spec, the values computed between the two, such as the accumulator, are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.argument_specs import ArgumentSpecs
from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.jaxprs.elementwise import elementwise_classes
from mpmd.compiler.steps import CutStep
from mpmd.ir.plan import Spec


def infer_specs(graph: TaskGraph, specs: ArgumentSpecs) -> dict[Var, Spec]:
    """Returns the known specs of outer values, the specs of accumulators, and the specs that types had.

    A result without a requested spec is sharded like the argument that the next step passes in its place.
    """
    inferred = _spread(graph.outer, _decided(graph.step, specs))
    for a in graph.accumulators:
        # An accumulator has the same spec before and after each update.
        inferred |= dict.fromkeys((a.initial, a.state, a.updated, a.result), inferred.get(a.result, ()))
    return {**graph.step.explicit_specs, **inferred}


def _decided(step: CutStep, specs: ArgumentSpecs) -> dict[Var, Spec]:
    """Returns the specs of arguments, constants and results, and the specs in types of values."""
    arguments = [argument.var for argument in step.arguments]
    results = [result.var for result in step.results]
    decided: dict[Var, Spec] = dict(zip(arguments, specs.arguments, strict=True))
    decided |= {constant.var: () for constant in step.constants}
    decided |= {var: spec for var, spec in step.explicit_specs.items() if var not in decided}
    for argument, result in step.fed_back:
        decided.setdefault(results[result], decided[arguments[argument]])
    for var, spec in zip(results, specs.results, strict=True):
        if spec is not None and var not in arguments:
            decided[var] = spec
    return decided


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
