"""Removes the equations, the loops and the results of loops that no result of the step needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import free_variables, variables
from mpmd.compiler.jaxprs.live import live_eqns
from mpmd.compiler.steps import Loop
from mpmd.errors import CompileError


def without_dead_code(
    outside: Sequence[Sequence[JaxprEqn]], loops: Sequence[Loop], results: Sequence[Var]
) -> tuple[tuple[tuple[JaxprEqn, ...], ...], tuple[Loop, ...]]:
    """The loops, and the equations before, between and after them, that the results need.

    Raises: ``CompileError`` when the results need none of the loops.
    """
    needed: set[Var] = set(results)
    live = [live_eqns(outside[-1], needed)]
    kept: list[Loop] = []
    for loop, eqns in zip(reversed(loops), reversed(outside[:-1]), strict=True):
        needed.update(free_variables(live[0]))
        if (alive := _live_loop(loop, needed)) is None:
            live[0] = (*live_eqns(eqns, needed), *live[0])
            continue
        kept.insert(0, alive)
        needed.update(free_variables(alive.eqns))
        needed.update(variables(atom for r in alive.results for atom in (r.value, r.initial)))
        live.insert(0, live_eqns(eqns, needed))
    if loops and not kept:
        at = ", ".join(loop.where for loop in loops)
        raise CompileError(f"no result of the step depends on its treduce, at {at}")
    return tuple(live), tuple(kept)


def _live_loop(loop: Loop, needed: Set[Var]) -> Loop | None:
    """The part of a loop that is needed; ``None`` if nothing is."""
    kept = tuple(result for result in loop.results if result.result in needed)
    while True:  # until all states that callbacks read are kept
        body = live_eqns(loop.eqns, [result.value for result in kept])
        read_in_loop = {*free_variables(body), *variables(result.value for result in kept)}
        more = tuple(r for r in loop.results if r in kept or r.state in read_in_loop)
        if more == kept:
            break
        kept = more
    if not kept and not any(eqn.effects for eqn in body):
        return None
    return dataclasses.replace(loop, eqns=body, results=kept)
