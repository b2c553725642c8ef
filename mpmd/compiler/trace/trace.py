"""Traces a train step once, and finds its microbatch loop, if it has one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh

from mpmd.compat import with_constants_as_inputs
from mpmd.compiler.graph import Argument, Constant, Loop, LoopResult, Result, TracedStep
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    avals_of,
    inline_calls,
    lookup,
    substitute,
    traced_eqns,
)
from mpmd.compiler.stacks import CutStep, cut_stacks, in_loops, with_marks_open
from mpmd.compiler.trace.abstract_meshes import with_abstract_meshes
from mpmd.compiler.trace.carried_state import find_carried_state
from mpmd.compiler.trace.check_loop import check_loop
from mpmd.compiler.trace.dead_code import live_eqns, without_dead_code
from mpmd.compiler.trace.ignore_marks import ignore_marks
from mpmd.compiler.trace.number_marks import number_live_marks, number_marks
from mpmd.reduce import treduce_p
from mpmd.sharding import within
from mpmd.stack import Leaf, Stack
from mpmd.tree import argument_paths, paths


def trace(
    fun: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    submeshes: Sequence[AbstractMesh],
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
      argument_stacks, result_stacks: for a function without a loop, how each leaf of the arguments and of the
        result is in parts; ``None`` for one that is whole, none if all are.

    Raises: ``CompileError`` for a step with several loops, and for marks that do not make the stages of the
      loop's schedule.
    Warns: ``PerformanceWarning`` for marks without a loop, and for equations that put parts together.
    """

    def trace_once(args: tuple, kwargs: dict[str, Any]) -> TracedStep:
        written = _write_down(fun, args, kwargs, submeshes)
        given = () if written.has_loop else (argument_stacks, result_stacks)
        return _traced(written, cut_stacks(*written.step, *given))

    traced = trace_once(args, kwargs)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    weak = {traced.argument_leaf(i) for i, j in traced.carried_state if _loses_weak_type(traced, i, j)}
    if not weak:
        return traced
    for i in weak:
        leaves[i] = jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype)
    strong = trace_once(*jax.tree.unflatten(treedef, leaves))
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


@dataclasses.dataclass(frozen=True)
class _Written:
    """A step as it is written.

    Attributes:
      jaxpr: of the leaves of its arguments, with the calls outside of loops inlined.
      constants: the values of the variables that it reads besides.
      argument_paths: what its user calls the arguments.
      out_shape: its result as a pytree.
      carried_state: pairs of an argument's and a result's position that a training loop will connect.
    """

    jaxpr: Jaxpr
    constants: dict[Var, Any]
    argument_paths: tuple[str, ...]
    out_shape: Any
    carried_state: tuple[tuple[int, int], ...]

    @property
    def has_loop(self) -> bool:
        return any(eqn.primitive is treduce_p for eqn in self.jaxpr.eqns)

    @property
    def step(self) -> tuple[Jaxpr, dict[Var, Any], tuple[tuple[int, int], ...]]:
        """What is cut."""
        return self.jaxpr, self.constants, self.carried_state


def _write_down(
    fun: Callable, args: tuple, kwargs: dict[str, Any], submeshes: Sequence[AbstractMesh]
) -> _Written:
    closed, out_shape = _make_jaxpr(fun, args, kwargs, submeshes[0])
    jaxpr, constants = _inlined(closed, submeshes)
    check_loop(jaxpr)
    if not any(eqn.primitive is treduce_p for eqn in jaxpr.eqns):
        jaxpr = ignore_marks(jaxpr)
    carried = find_carried_state((*args, *kwargs.values()), jaxpr, out_shape)
    return _Written(jaxpr, constants, argument_paths(args, kwargs), out_shape, carried)


def _traced(written: _Written, cut: CutStep) -> TracedStep:
    argument_leaves = tuple(map(_leaf, written.argument_paths, written.jaxpr.invars, cut.argument_stacks))
    result_leaves = tuple(map(_leaf, paths(written.out_shape), written.jaxpr.outvars, cut.result_stacks))
    copies, result_vars = _result_vars(cut.jaxpr, cut.constants)
    before, loop, after = _around_loop(cut.jaxpr, copies, result_vars)
    read = {atom for eqn in (*before, *after) for atom in eqn.invars if isinstance(atom, Var)}
    if loop is not None:
        read |= {atom for eqn in loop.eqns for atom in eqn.invars if isinstance(atom, Var)}
        of_results = (atom for result in loop.results for atom in (result.initial, result.value))
        read |= {atom for atom in of_results if isinstance(atom, Var)}
    argument_names = [name for leaf in argument_leaves for name in leaf.names]
    result_names = [name for leaf in result_leaves for name in leaf.names]
    return TracedStep(
        arguments=tuple(map(Argument, argument_names, cut.jaxpr.invars)),
        constants=tuple(Constant(var, value) for var, value in cut.constants.items() if var in read),
        before=before,
        loop=loop,
        after=after,
        results=tuple(map(Result, result_names, result_vars)),
        out_shape=written.out_shape,
        argument_leaves=argument_leaves,
        result_leaves=result_leaves,
        carried_state=tuple(_carried_parts(written.carried_state, argument_leaves, result_leaves)),
    )


def _leaf(path: str, atom: Atom, stack: Stack | None) -> Leaf:
    aval = aval_of(atom)
    return Leaf(path, tuple(aval.shape), aval.dtype, aval.weak_type, stack)


def _carried_parts(
    carried_state: Sequence[tuple[int, int]], arguments: Sequence[Leaf], results: Sequence[Leaf]
) -> Iterator[tuple[int, int]]:
    """The pairs of the parts of leaves."""
    first_argument = [0, *itertools.accumulate(len(leaf.names) for leaf in arguments)]
    first_result = [0, *itertools.accumulate(len(leaf.names) for leaf in results)]
    for i, j in carried_state:
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


def _make_jaxpr(fun: Callable, args: tuple, kwargs: dict[str, Any], submesh: AbstractMesh) -> tuple[Any, Any]:
    """Traces within the submesh, for specs without a mesh, or else without, for ``shard_map``s with one.

    Within a mesh JAX refuses a ``shard_map`` over another one, with a ``ValueError`` like any other.
    """
    make = jax.make_jaxpr(fun, return_shape=True)
    try:
        with within(submesh):
            return make(*args, **kwargs)
    except ValueError as error:
        try:
            with within(AbstractMesh((), ())):
                return make(*args, **kwargs)
        except (ValueError, RuntimeError):
            raise error from error.__cause__


def _inlined(closed: ClosedJaxpr, submeshes: Sequence[AbstractMesh]) -> tuple[Jaxpr, dict[Var, Any]]:
    """The step without calls outside of loops, and, in loops, without those that have marks inside.

    Rematerialised functions count as calls there.

    Returns: a jaxpr of the arguments, and the values of the constants that it reads.
    """
    jaxpr = with_constants_as_inputs(closed)
    values = dict(zip(jaxpr.invars, closed.consts, strict=False))
    jaxpr, hoisted = inline_calls(with_abstract_meshes(jaxpr, submeshes), lambda eqn: True)
    values |= hoisted
    jaxpr, hoisted = in_loops(jaxpr, with_marks_open)
    values |= hoisted
    arguments = [var for var in jaxpr.invars if var not in values]
    return jaxpr.replace(invars=arguments), values


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
        )
        for value, is_sum, initial, result, ordered in zip(
            body.outvars,
            eqn.params["summed"],
            eqn.invars[closed_over:],
            eqn.outvars,
            eqn.params["ordered"],
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
