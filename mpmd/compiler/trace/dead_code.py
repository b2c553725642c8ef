"""Removes the equations, and the results of the loop, that no result of the step needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn, Var
from jax.interpreters import partial_eval

from mpmd.compiler.graph import Loop
from mpmd.compiler.jaxprs.equations import Atom, free_variables, make_jaxpr
from mpmd.errors import CompileError


def without_dead_code(
    before: Sequence[JaxprEqn], loop: Loop, after: Sequence[JaxprEqn], results: Sequence[Var]
) -> tuple[tuple[JaxprEqn, ...], Loop, tuple[JaxprEqn, ...]]:
    """What the results need of the equations before the loop, of the loop, and of those after it.

    Raises: ``CompileError`` when the results need nothing of the loop.
    """
    live_after = live_eqns(after, results)
    read_after = {*free_variables(live_after), *results}
    kept = tuple(result for result in loop.results if result.result in read_after)
    while True:  # until all states that callbacks read are kept
        body = live_eqns(loop.eqns, [result.value for result in kept])
        read_in_loop = {*free_variables(body), *_variables(result.value for result in kept)}
        needed = tuple(r for r in loop.results if r in kept or r.state in read_in_loop)
        if needed == kept:
            break
        kept = needed
    if not kept and not any(eqn.effects for eqn in body):
        raise CompileError("no result of the step depends on its treduce")
    initial = _variables(result.initial for result in kept)
    live_before = live_eqns(before, [*read_after, *read_in_loop, *initial])
    return live_before, dataclasses.replace(loop, eqns=body, results=kept), live_after


def live_eqns(eqns: Sequence[JaxprEqn], wanted: Iterable[Atom]) -> tuple[JaxprEqn, ...]:
    """The equations, and the parts of them, that make what is wanted; and those that have effects."""
    made = {var for eqn in eqns for var in eqn.outvars}
    outvars = [var for var in dict.fromkeys(_variables(wanted)) if var in made]
    whole = make_jaxpr(free_variables(eqns), eqns, outvars)
    live, _ = partial_eval.dce_jaxpr(whole, [True] * len(outvars))
    return tuple(live.eqns)


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var)]
