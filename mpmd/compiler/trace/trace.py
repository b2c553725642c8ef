"""Traces a train step for the types that its state has after the first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import (
    aval_of,
    is_among,
    lookup,
    operands,
    subjaxprs,
    substitute,
    with_eqns,
)
from mpmd.compiler.jaxprs.live import live_eqns
from mpmd.compiler.request import CompileRequest
from mpmd.compiler.steps import TracedStep
from mpmd.compiler.trace.to_jaxpr import to_jaxpr


def trace(request: CompileRequest) -> TracedStep:
    """Traces a step under the first group's submesh, with the state as the step returns it.

    Arrays made of Python numbers, such as ``jnp.full(3, 0.1)``, have a weak type at first and, once updated,
    no longer. The difference only matters where dtypes mix, and to weak types of results; where it may, the
    arguments keep their weak types, and the second call compiles again, as under ``jax.jit``.

    Raises: ``CompileError`` for loops that cannot be pipelined.
    """
    step = to_jaxpr(
        request.fun, request.args, dict(request.kwargs), request.submeshes, request.in_specs, request.donated
    )
    weak = {i for i, j in step.fed_back_leaves if _loses_weak_type(step.jaxpr, i, j)}
    if not weak or _decide_types(step.jaxpr, weak):
        return step
    return _without_weak_types(step, weak)


def _loses_weak_type(jaxpr: Jaxpr, argument: int, result: int) -> bool:
    return aval_of(jaxpr.invars[argument]).weak_type and not aval_of(jaxpr.outvars[result]).weak_type


def _decide_types(jaxpr: Jaxpr, weak: Set[int]) -> bool:
    """Whether a dtype, or the weak type of a result, may follow from the weak types of these arguments.

    JAX converts a weakly typed value where it meets another dtype of its kind. A user's own cast looks the
    same. An integer that meets a float is converted, and so is a boolean, whatever its weak type.
    """
    reached = {jaxpr.invars[i] for i in weak}
    for eqn in live_eqns(jaxpr.eqns, jaxpr.outvars):
        if not reached.isdisjoint(operands(eqn)):
            if _converts_weakly_typed(eqn):
                return True
            reached.update(eqn.outvars)
    return any(is_among(atom, reached) and aval_of(atom).weak_type for atom in jaxpr.outvars)


def _converts_weakly_typed(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return any(_converts_weakly_typed(inner) for body in subjaxprs(eqn) for inner in body.eqns)
    before, after = aval_of(eqn.invars[0]), eqn.params["new_dtype"]
    kinds = (jnp.integer, jnp.inexact)
    is_of_kind = any(jnp.issubdtype(before.dtype, kind) and jnp.issubdtype(after, kind) for kind in kinds)
    return before.weak_type and before.dtype != after and is_of_kind


def _without_weak_types(step: TracedStep, arguments: Set[int]) -> TracedStep:
    jaxpr = step.jaxpr
    before = [jaxpr.invars[i] for i in arguments]
    strong = {var: Var(aval_of(var).update(weak_type=False)) for var in before}
    return dataclasses.replace(
        step,
        jaxpr=with_eqns(
            jaxpr,
            [substitute(eqn, strong) for eqn in jaxpr.eqns],
            invars=[strong.get(var, var) for var in jaxpr.invars],
            outvars=[lookup(atom, strong) for atom in jaxpr.outvars],
        ),
        explicit_specs={strong.get(var, var): spec for var, spec in step.explicit_specs.items()},
    )
