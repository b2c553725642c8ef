"""Copies results that are also arguments, or other results, and are to have another spec than these."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.argument_specs import ArgumentSpecs
from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.jaxprs.equations import aval_of
from mpmd.compiler.jaxprs.sharded_dimensions import dimensions_of
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.compiler.steps import Result
from mpmd.ir.plan import Spec


def with_results_apart(graph: TaskGraph, specs: ArgumentSpecs) -> TaskGraph:
    """The graph with a copy for each result whose spec is not that which its variable has already."""
    step = graph.step
    known = {argument.var: spec for argument, spec in zip(step.arguments, specs.arguments, strict=True)}
    copies: list[JaxprEqn] = []
    results: list[Result] = []
    for result, spec in zip(step.results, specs.results, strict=True):
        var = result.var
        if spec is not None and not _are_alike(var, known.setdefault(var, spec), spec):
            eqns, (var,) = traced_eqns(lambda x: [jnp.copy(x)], [var])
            copies += eqns
        results.append(dataclasses.replace(result, var=var))
    outside = (*step.outside[:-1], (*step.outside[-1], *copies))
    apart = dataclasses.replace(step, outside=outside, results=tuple(results))
    return dataclasses.replace(graph, step=apart, outer=(*graph.outer, *copies))


def _are_alike(var: Var, spec: Spec, other: Spec) -> bool:
    rank = len(aval_of(var).shape)
    return dimensions_of(spec, rank) == dimensions_of(other, rank)
