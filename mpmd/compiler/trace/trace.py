"""Traces a train step once, and finds its microbatch loop, if it has one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.graph import Argument, Constant, Loop, LoopResult, Result, TracedStep
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    avals_of,
    lookup,
    substitute,
    traced_eqns,
)
from mpmd.compiler.stacks import CutStep, cut_stacks
from mpmd.compiler.trace.dead_code import live_eqns, without_dead_code
from mpmd.compiler.trace.host_callbacks import with_host_callbacks
from mpmd.compiler.trace.number_marks import number_live_marks, number_marks
from mpmd.compiler.trace.written import WrittenStep, write_down
from mpmd.ir import Spec
from mpmd.reduce import treduce_p
from mpmd.stack import Leaf, Stack
from mpmd.tree import paths


def trace(
    fun: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    submeshes: Sequence[AbstractMesh],
    specs: Sequence[Spec | None] | None = None,
    argument_stacks: Sequence[Stack | None] = (),
    result_stacks: Sequence[Stack | None] = (),
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
      argument_stacks, result_stacks: for a function without a loop, how each leaf of the arguments and of the
        result is in parts; ``None`` for one that is whole, none if all are.

    Raises: ``CompileError`` for a step with several loops, and for marks that do not make the stages of the
      loop's schedule.
    Warns: ``PerformanceWarning`` for marks without a loop, and for equations that put parts together.
    """

    def trace_once(args: tuple, kwargs: dict[str, Any]) -> TracedStep:
        written = write_down(fun, args, kwargs, submeshes, specs)
        given = () if written.has_loop else (argument_stacks, result_stacks)
        cut = cut_stacks(written.jaxpr, written.constants, written.carried_leaves, *given)
        return _traced(written, cut)

    traced = trace_once(args, kwargs)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    weak = [i for i, j in traced.carried_leaves if _loses_weak_type(traced, i, j)]
    if not weak:
        return traced
    for i in weak:
        leaves[i] = jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype)
    strong = trace_once(*jax.tree.unflatten(treedef, leaves))
    return strong if _dtypes(strong) == _dtypes(traced) else traced


def _loses_weak_type(traced: TracedStep, argument: int, result: int) -> bool:
    return traced.argument_leaves[argument].weak_type and not traced.result_leaves[result].weak_type


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


def _traced(written: WrittenStep, cut: CutStep) -> TracedStep:
    argument_leaves = tuple(map(_leaf, written.argument_paths, written.jaxpr.invars, cut.argument_stacks))
    result_leaves = tuple(map(_leaf, paths(written.out_shape), written.jaxpr.outvars, cut.result_stacks))
    jaxpr = with_host_callbacks(cut.jaxpr)
    copies, result_vars = _result_vars(jaxpr, cut.constants)
    before, loop, after = _around_loop(jaxpr, copies, result_vars)
    read = {atom for eqn in (*before, *after) for atom in eqn.invars if isinstance(atom, Var)}
    if loop is not None:
        read |= {atom for eqn in loop.eqns for atom in eqn.invars if isinstance(atom, Var)}
        of_results = (atom for result in loop.results for atom in (result.initial, result.value))
        read |= {atom for atom in of_results if isinstance(atom, Var)}
    argument_names = [name for leaf in argument_leaves for name in leaf.names]
    result_names = [name for leaf in result_leaves for name in leaf.names]
    return TracedStep(
        arguments=tuple(map(Argument, argument_names, jaxpr.invars)),
        constants=tuple(Constant(var, value) for var, value in cut.constants.items() if var in read),
        before=before,
        loop=loop,
        after=after,
        results=tuple(map(Result, result_names, result_vars)),
        out_shape=written.out_shape,
        argument_leaves=argument_leaves,
        result_leaves=result_leaves,
        carried_leaves=written.carried_leaves,
        carried_state=tuple(_carried_parts(written.carried_leaves, argument_leaves, result_leaves)),
        typed=cut.of_parts(written.typed),
    )


def _leaf(path: str, atom: Atom, stack: Stack | None) -> Leaf:
    aval = aval_of(atom)
    return Leaf(path, tuple(aval.shape), aval.dtype, aval.weak_type, stack)


def _carried_parts(
    carried_leaves: Sequence[tuple[int, int]], arguments: Sequence[Leaf], results: Sequence[Leaf]
) -> Iterator[tuple[int, int]]:
    """The pairs of the parts of leaves."""
    first_argument = [0, *itertools.accumulate(len(leaf.names) for leaf in arguments)]
    first_result = [0, *itertools.accumulate(len(leaf.names) for leaf in results)]
    for i, j in carried_leaves:
        if arguments[i].stack == results[j].stack:
            yield from ((first_argument[i] + p, first_result[j] + p) for p in range(len(arguments[i].names)))


def _around_loop(
    jaxpr: Jaxpr, copies: Sequence[JaxprEqn], wanted: Sequence[Var]
) -> tuple[tuple[JaxprEqn, ...], Loop | None, tuple[JaxprEqn, ...]]:
    """The live equations before the loop, the loop, and the live equations after it."""
    at = next((i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive is treduce_p), None)
    if at is None:
        return (), None, live_eqns([*jaxpr.eqns, *copies], wanted)
    loop = _loop(jaxpr.eqns[at])
    numbered = number_marks(loop)
    before, loop, after = without_dead_code(
        jaxpr.eqns[:at], numbered or loop, [*jaxpr.eqns[at + 1 :], *copies], wanted
    )
    return before, number_live_marks(loop, numbered is not None), after


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


def _result_vars(jaxpr: Jaxpr, constants: Collection[Var]) -> tuple[list[JaxprEqn], list[Var]]:
    """The results, each a value of the step, and the equations that make copies of literals and constants."""
    eqns: list[JaxprEqn] = []
    results: list[Var] = []
    for atom in jaxpr.outvars:
        if isinstance(atom, Literal) or atom in constants:
            copies, (atom,) = traced_eqns(lambda x: [jnp.copy(x)], [atom])
            eqns += copies
        results.append(atom)
    return eqns, results
