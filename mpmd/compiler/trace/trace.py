"""Traces a train step once, and finds its microbatch loop, if it has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh

from mpmd.annotate import mark_p
from mpmd.compat import with_constants_as_inputs
from mpmd.compiler.graph import Argument, Constant, Loop, LoopResult, Result, TracedStep
from mpmd.compiler.jaxprs.equations import (
    any_inside,
    aval_of,
    avals_of,
    inline_calls,
    lookup,
    substitute,
    traced_eqns,
    with_eqns,
)
from mpmd.compiler.jaxprs.sharding_types import WithoutTypes
from mpmd.compiler.trace.abstract_meshes import with_abstract_meshes
from mpmd.compiler.trace.carried_state import find_carried_state
from mpmd.compiler.trace.check_loop import check_loop
from mpmd.compiler.trace.dead_code import live_eqns, without_dead_code
from mpmd.compiler.trace.host_callbacks import has_callback, with_host_callbacks
from mpmd.compiler.trace.ignore_marks import without_marks
from mpmd.compiler.trace.number_marks import number_live_marks, number_marks
from mpmd.compiler.trace.traced_within import traced_within_submesh
from mpmd.ir import Spec
from mpmd.reduce import treduce_p
from mpmd.sharding import with_auto_axes
from mpmd.tree import argument_paths, paths


def trace(
    fun: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    submeshes: Sequence[AbstractMesh],
    specs: Sequence[Spec | None] | None = None,
) -> TracedStep:
    """Traces ``fun(*args, **kwargs)`` under the first group's submesh, with the state as the step returns it.

    Arrays made of Python numbers, such as ``jnp.full(3, 0.1)``, have a weak type at first and, once updated,
    no longer. The difference only matters where dtypes mix; where it does, the step is traced as it was
    called, and the second call compiles again, as under ``jax.jit``.

    Args:
      fun: the step; static arguments are already bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.
      submeshes: those of the groups.
      specs: how each leaf of the arguments is sharded; ``None`` for one, or for all: replicated. Along
        explicit axes types say so.

    Raises: ``CompileError`` for a step with several loops, and for marks that do not make the stages of the
      loop's schedule.
    Warns: ``PerformanceWarning`` for marks without a loop.
    """
    traced = _trace_once(fun, args, kwargs, submeshes, specs)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    weak = [i for i, j in traced.carried_state if _loses_weak_type(traced, i, j)]
    if not weak:
        return traced
    for i in weak:
        leaves[i] = jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype)
    args, kwargs = jax.tree.unflatten(treedef, leaves)
    strong = _trace_once(fun, args, kwargs, submeshes, specs)
    return strong if _dtypes(strong) == _dtypes(traced) else traced


def _loses_weak_type(traced: TracedStep, argument: int, result: int) -> bool:
    before, after = aval_of(traced.arguments[argument].var), aval_of(traced.results[result].var)
    return before.weak_type and not after.weak_type


def _dtypes(traced: TracedStep) -> list[Any]:
    """The dtypes of all that a step computes, other than by conversions that change weak types alone."""
    loop = traced.loop
    eqns = (*traced.before, *(loop.eqns if loop else ()), *traced.after)
    return [aval_of(result.result).dtype for result in (loop.results if loop else ())] + [
        aval.dtype
        for eqn in eqns
        for aval in avals_of(eqn.outvars)
        if eqn.primitive.name != "convert_element_type" or aval.dtype != aval_of(eqn.invars[0]).dtype
    ]


def _trace_once(
    fun: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    submeshes: Sequence[AbstractMesh],
    specs: Sequence[Spec | None] | None,
) -> TracedStep:
    closed, out_shape = traced_within_submesh(fun, args, kwargs, submeshes, specs)
    untyped = WithoutTypes()
    jaxpr, values = _inlined(closed, submeshes, untyped)
    check_loop(jaxpr)
    jaxpr = with_host_callbacks(jaxpr)
    if not any(eqn.primitive is treduce_p for eqn in jaxpr.eqns):
        jaxpr = without_marks(jaxpr)
    copies, results = _results(jaxpr, values, paths(out_shape))
    before, loop, after = _around_loop(jaxpr, copies, results)
    arguments = tuple(map(Argument, argument_paths(args, kwargs), jaxpr.invars))
    read = {atom for eqn in (*before, *after) for atom in eqn.invars if isinstance(atom, Var)}
    if loop is not None:
        read |= {atom for eqn in loop.eqns for atom in eqn.invars if isinstance(atom, Var)}
        of_results = (atom for result in loop.results for atom in (result.initial, result.value))
        read |= {atom for atom in of_results if isinstance(atom, Var)}
    constants = tuple(Constant(var, value) for var, value in values.items() if var in read)
    traced = TracedStep(
        arguments=arguments,
        constants=constants,
        before=before,
        loop=loop,
        after=after,
        results=results,
        out_shape=out_shape,
        carried_state=(),
        typed=untyped.specs,
    )
    carried = find_carried_state((*args, *kwargs.values()), traced)
    return dataclasses.replace(traced, carried_state=carried)


def _around_loop(
    jaxpr: Jaxpr, copies: Sequence[JaxprEqn], results: Sequence[Result]
) -> tuple[tuple[JaxprEqn, ...], Loop | None, tuple[JaxprEqn, ...]]:
    """The live equations before the loop, the loop, and the live equations after it."""
    wanted = [result.var for result in results]
    at = next((i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive is treduce_p), None)
    if at is None:
        return (), None, live_eqns([*jaxpr.eqns, *copies], wanted)
    loop = _loop(jaxpr.eqns[at])
    numbered = number_marks(loop)
    before, loop, after = without_dead_code(
        jaxpr.eqns[:at], numbered or loop, [*jaxpr.eqns[at + 1 :], *copies], wanted
    )
    return before, number_live_marks(loop, numbered is not None), after


def _inlined(
    closed: ClosedJaxpr, submeshes: Sequence[AbstractMesh], untyped: WithoutTypes
) -> tuple[Jaxpr, dict[Var, Any]]:
    """The step without calls outside of loops and, in loops, without those with marks or callbacks inside.

    Returns: a jaxpr of the arguments, and the values of the constants that it reads.
    """
    jaxpr = with_constants_as_inputs(closed)
    values = dict(zip(jaxpr.invars, closed.consts, strict=False))
    jaxpr, hoisted = inline_calls(jaxpr, lambda eqn: True)
    values |= hoisted
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            body, hoisted = inline_calls(
                eqn.params["body"], lambda inner: any_inside(inner, mark_p) or has_callback(inner)
            )
            # The values that the inlined calls closed over become operands of the loop.
            eqn = eqn.replace(invars=[*hoisted, *eqn.invars], params={**eqn.params, "body": body})
            values |= hoisted
        eqns.append(eqn)
    arguments = [var for var in jaxpr.invars if var not in values]
    jaxpr = untyped.jaxpr(with_eqns(jaxpr, eqns, invars=arguments))
    values = {untyped.variable(var): value for var, value in values.items()}
    return with_abstract_meshes(jaxpr, [*map(with_auto_axes, submeshes)]), values


def _loop(eqn: JaxprEqn) -> Loop:
    """The loop of a ``treduce`` equation, whose body reads outer variables directly."""
    body: Jaxpr = eqn.params["body"]
    closed_over = len(eqn.invars) - len(eqn.outvars)
    outer = dict(zip(body.invars[:closed_over], eqn.invars[:closed_over], strict=True))
    index, *carried = body.invars[closed_over:]
    states = iter(carried)
    results = tuple(
        LoopResult(
            value=lookup(value, outer),
            state=None if is_sum else next(states),
            initial=initial,
            result=result,
            ordered=ordered,
            carried=carries,
        )
        for value, is_sum, initial, result, ordered, carries in zip(
            body.outvars,
            eqn.params["summed"],
            eqn.invars[closed_over:],
            eqn.outvars,
            eqn.params["ordered"],
            eqn.params["carried"],
            strict=True,
        )
    )
    eqns = tuple(substitute(inner, outer) for inner in body.eqns)
    return Loop(
        index=index,
        eqns=eqns,
        results=results,
        num_microbatches=eqn.params["length"],
        schedule=eqn.params["schedule"],
    )


def _results(
    jaxpr: Jaxpr, constants: Collection[Var], out_paths: tuple[str, ...]
) -> tuple[list[JaxprEqn], tuple[Result, ...]]:
    """The results, each a value of the step, and the equations that make copies of literals and constants."""
    eqns: list[JaxprEqn] = []
    results: list[Result] = []
    for path, atom in zip(out_paths, jaxpr.outvars, strict=True):
        if isinstance(atom, Literal) or atom in constants:
            copies, (atom,) = traced_eqns(lambda x: [jnp.copy(x)], [atom])
            eqns += copies
        results.append(Result(path, atom))
    return eqns, tuple(results)
