"""Traces a train step once, and finds its microbatch loops, if it has any."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.cut_layers import CutStep, cut_stacks
from mpmd.compiler.graph import Argument, Constant, Loop, LoopResult, Result, TracedStep
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    avals_of,
    lookup,
    substitute,
    traced_eqns,
)
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.trace.dead_code import without_dead_code
from mpmd.compiler.trace.host_callbacks import with_host_callbacks
from mpmd.compiler.trace.number_marks import number_live_marks, number_marks
from mpmd.compiler.trace.written import WrittenStep, write_down
from mpmd.ir.plan import Spec
from mpmd.ir.stack import Leaf, Stack
from mpmd.language.reduce import treduce_p
from mpmd.util.tree import paths


def trace(
    fun: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    submeshes: Sequence[AbstractMesh],
    specs: Sequence[Spec | None] | None = None,
    argument_stacks: Sequence[Stack | None] = (),
    result_stacks: Sequence[Stack | None] = (),
    donated: Sequence[bool] = (),
) -> TracedStep:
    """Traces ``fun(*args, **kwargs)`` under the first group's submesh, with the state as the step returns it.

    Arrays made of Python numbers, such as ``jnp.full(3, 0.1)``, have a weak type at first and, once updated,
    no longer. The difference only matters where dtypes mix, and to weak types of results; where it does, the
    step is traced as it was called, and the second call compiles again, as under ``jax.jit``.

    Args:
      fun: the step; static arguments are already bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.
      submeshes: those of the groups.
      specs: how each leaf of the arguments is sharded; ``None`` for one, or for all: replicated. Along
        explicit axes types say so.
      argument_stacks, result_stacks: for a function without a loop, how each leaf of the arguments and of the
        result is in parts; ``None`` for one that is whole, none if all are.
      donated: for each leaf of the arguments, whether the caller gives it up; none if none is.

    Raises: ``CompileError`` for loops that cannot be pipelined, and for marks that do not make the stages of
      the schedules.
    Warns: ``PerformanceWarning`` for marks without a loop, and for equations that put parts together.
    """

    def trace_once(args: tuple, kwargs: dict[str, Any]) -> TracedStep:
        written = write_down(fun, args, kwargs, submeshes, specs, donated)
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
    return strong if _types(strong) == _types(traced) else traced


def _loses_weak_type(traced: TracedStep, argument: int, result: int) -> bool:
    return traced.argument_leaves[argument].weak_type and not traced.result_leaves[result].weak_type


def _types(traced: TracedStep) -> tuple[list[bool], list[Any]]:
    """Whether each result has a weak type, and the dtypes of all that a step computes.

    Conversions that change weak types alone compute nothing.
    """
    segments = (*traced.outside, *(loop.eqns for loop in traced.loops))
    dtypes = [aval_of(result.result).dtype for loop in traced.loops for result in loop.results] + [
        aval.dtype
        for eqn in itertools.chain(*segments)
        for aval in avals_of(eqn.outvars)
        if eqn.primitive.name != "convert_element_type" or aval.dtype != aval_of(eqn.invars[0]).dtype
    ]
    return [leaf.weak_type for leaf in traced.result_leaves], dtypes


def _traced(written: WrittenStep, cut: CutStep) -> TracedStep:
    argument_leaves = tuple(map(_leaf, written.argument_paths, written.jaxpr.invars, cut.argument_stacks))
    result_leaves = tuple(map(_leaf, paths(written.out_shape), written.jaxpr.outvars, cut.result_stacks))
    jaxpr = with_host_callbacks(cut.jaxpr)
    copies, result_vars = _result_vars(jaxpr, cut.constants)
    outside, loops = _segments(jaxpr, copies, result_vars)
    segments = (*outside, *(loop.eqns for loop in loops))
    read = {atom for eqn in itertools.chain(*segments) for atom in eqn.invars if isinstance(atom, Var)}
    for result in itertools.chain(*(loop.results for loop in loops)):
        read |= {atom for atom in (result.initial, result.value) if isinstance(atom, Var)}
    argument_names = [name for leaf in argument_leaves for name in leaf.names]
    result_names = [name for leaf in result_leaves for name in leaf.names]
    return TracedStep(
        arguments=tuple(map(Argument, argument_names, jaxpr.invars)),
        constants=tuple(Constant(var, value) for var, value in cut.constants.items() if var in read),
        loops=loops,
        outside=outside,
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


def _segments(
    jaxpr: Jaxpr, copies: Sequence[JaxprEqn], wanted: Sequence[Var]
) -> tuple[tuple[tuple[JaxprEqn, ...], ...], tuple[Loop, ...]]:
    """The live equations before, between and after the loops, and the loops."""
    outside: list[list[JaxprEqn]] = [[]]
    loops: list[Loop] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            loops.append(_loop(eqn))
            outside.append([])
        else:
            outside[-1].append(eqn)
    outside[-1] += copies
    numbered = number_marks(loops)
    live, live_loops = without_dead_code(outside, numbered, wanted)
    return live, number_live_marks(live_loops, numbered)


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
        where=where(eqn),
        index=index,
        eqns=eqns,
        results=results,
        num_microbatches=eqn.params["length"],
        schedule=eqn.params["schedule"],
        decided=eqn.params["number"],
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
