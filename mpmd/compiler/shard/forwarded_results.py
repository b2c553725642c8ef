"""Gives results specs of their own, where they are arguments, or other results, with another spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.dimensions import dimensions_of
from mpmd.compiler.jaxprs.equations import aval_of
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.compiler.steps import CutStep, Result
from mpmd.ir.plan import Spec


def with_results_apart(
    step: CutStep, in_specs: Sequence[Spec] | None, out_specs: Sequence[Spec | None] | None
) -> CutStep:
    """The step with a copy for each result whose spec is not that which its variable has already.

    Args:
      in_specs: for each argument; ``None``: all are replicated.
      out_specs: for each result; ``None`` for one, or for all: left open.
    """
    if out_specs is None:
        return step
    arguments = [argument.var for argument in step.arguments]
    specs: dict[Var, Spec] = dict(zip(arguments, in_specs or [()] * len(arguments), strict=True))
    copies: list[JaxprEqn] = []
    results: list[Result] = []
    for result, spec in zip(step.results, out_specs, strict=True):
        var = result.var
        if spec is not None and not _are_alike(var, specs.setdefault(var, spec), spec):
            eqns, (var,) = traced_eqns(lambda x: [jnp.copy(x)], [var])
            copies += eqns
        results.append(dataclasses.replace(result, var=var))
    outside = (*step.outside[:-1], (*step.outside[-1], *copies))
    return dataclasses.replace(step, outside=outside, results=tuple(results))


def _are_alike(var: Var, spec: Spec, other: Spec) -> bool:
    rank = len(aval_of(var).shape)
    return dimensions_of(spec, rank) == dimensions_of(other, rank)
