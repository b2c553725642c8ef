"""Finds out how values outside the loop are sharded, from the shardings of arguments and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.jaxprs.elementwise import elementwise_classes
from mpmd.compiler.steps import CutStep
from mpmd.ir.plan import Spec


def infer_specs(
    graph: TaskGraph, in_specs: Sequence[Spec] | None, out_specs: Sequence[Spec | None] | None
) -> dict[Var, Spec]:
    """The specs of variables outside the loop, as far as known, of accumulators, and of what types say.

    Args:
      in_specs: for each argument; ``None``: all are replicated.
      out_specs: for each result; ``None`` for one: as the argument whose place it takes, if any.
    """
    specs = _spread(graph.outer, _given(graph.step, in_specs, out_specs))
    for a in graph.accumulators:
        # An accumulator has the same spec before and after each update.
        specs |= dict.fromkeys((a.initial, a.state, a.updated, a.result), specs.get(a.result, ()))
    return {**graph.step.typed, **specs}


def _given(
    step: CutStep, in_specs: Sequence[Spec] | None, out_specs: Sequence[Spec | None] | None
) -> dict[Var, Spec]:
    """The specs of arguments, constants and results that the user has decided, and those that types say."""
    arguments = [argument.var for argument in step.arguments]
    results = [result.var for result in step.results]
    given: dict[Var, Spec] = dict(zip(arguments, in_specs or [()] * len(arguments), strict=True))
    given |= {constant.var: () for constant in step.constants}
    given |= {var: spec for var, spec in step.typed.items() if var not in given}
    for argument, result in step.carried_state:
        given.setdefault(results[result], given[arguments[argument]])
    for var, spec in zip(results, out_specs or [None] * len(results), strict=True):
        if spec is not None and var not in arguments:
            given[var] = spec
    return given


def _spread(eqns: Sequence[JaxprEqn], given: Mapping[Var, Spec]) -> dict[Var, Spec]:
    """Extends specs through elementwise equations, among values of the same shape.

    So the gradient accumulators and the optimizer's state of a weight are sharded like the weight: what an
    optimizer combines element by element has to be together. Where two specs meet, neither spreads.
    """
    classes = elementwise_classes(eqns)
    specs: dict[Var, set[Spec]] = {}
    for var, spec in given.items():
        specs.setdefault(classes.get(var, var), set()).add(spec)
    inferred = {
        var: next(iter(specs[found])) for var, found in classes.items() if len(specs.get(found, ())) == 1
    }
    return {**inferred, **given}
