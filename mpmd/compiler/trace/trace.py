"""Traces a train step for the types that its state has after the first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from mpmd.compiler.jaxprs.control_flow import live_eqns
from mpmd.compiler.jaxprs.equations import aval_of, avals_of
from mpmd.compiler.request import CompileRequest
from mpmd.compiler.steps import TracedStep
from mpmd.compiler.trace.to_jaxpr import to_jaxpr
from mpmd.language.reduce import treduce_p


def trace(request: CompileRequest) -> TracedStep:
    """Traces a step under the first group's submesh, with the state as the step returns it.

    Arrays that start as Python numbers, such as ``jnp.full(3, 0.1)``, have a weak type at first and, once
    updated, no longer. The difference only matters where dtypes mix, and to weak types of results; where it
    does, the step is traced as it was called, and the second call compiles again, as under ``jax.jit``.
    Whether it does is seen by a second trace, since ``jnp.zeros_like`` and ``jnp.result_type`` hand on the
    weak type of an array that no equation reads.

    Raises: ``CompileError`` for loops that cannot be pipelined.
    """
    leaves, treedef = jax.tree.flatten((request.args, dict(request.kwargs)))

    def traced(avals: list[Any]) -> TracedStep:
        args, kwargs = jax.tree.unflatten(treedef, avals)
        return to_jaxpr(dataclasses.replace(request, args=args, kwargs=kwargs))

    as_called = traced(leaves)
    weak = {i for i, j in as_called.fed_back_leaves if _loses_weak_type(as_called.jaxpr, i, j)}
    if not weak:
        return as_called
    as_updated = traced(
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if i in weak else leaf for i, leaf in enumerate(leaves)]
    )
    return as_updated if _types(as_updated.jaxpr) == _types(as_called.jaxpr) else as_called


def _loses_weak_type(jaxpr: Jaxpr, argument: int, result: int) -> bool:
    return aval_of(jaxpr.invars[argument]).weak_type and not aval_of(jaxpr.outvars[result]).weak_type


def _types(jaxpr: Jaxpr) -> tuple[list[bool], list[Any]]:
    """Whether each result has a weak type, and the dtypes of all that a step computes, with its numbers.

    The function may have read a number from a dtype, such as its ``finfo``.
    """
    computing = [eqn for eqn in _live(jaxpr) if not _changes_weak_type_alone(eqn)]
    dtypes = [aval.dtype for eqn in computing for aval in avals_of(eqn.outvars)]
    literals = [atom for eqn in computing for atom in eqn.invars if isinstance(atom, Literal)]
    numbers = [np.asarray(literal.val, aval_of(literal).dtype).tobytes() for literal in literals]
    return [aval_of(atom).weak_type for atom in jaxpr.outvars], dtypes + numbers


def _changes_weak_type_alone(eqn: JaxprEqn) -> bool:
    return (
        eqn.primitive.name == "convert_element_type"
        and aval_of(eqn.invars[0]).dtype == aval_of(eqn.outvars[0]).dtype
    )


def _live(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in live_eqns(jaxpr.eqns, jaxpr.outvars):
        yield eqn
        if eqn.primitive is treduce_p:
            yield from _live(eqn.params["body"])
