"""Opens what is in the way: calls, and rematerialised functions, whose equations are to be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import (
    Atom,
    any_inside,
    called,
    inline_calls,
    inlined_eqns,
    is_dropped,
    is_remat,
    lookup,
    substitute,
    with_eqns,
)
from mpmd.compiler.jaxprs.linear_solves import solution
from mpmd.language.annotate import mark_p
from mpmd.language.reduce import treduce_p

Constants = dict[Var, Any]


def has_mark(eqn: JaxprEqn) -> bool:
    return any_inside(eqn, mark_p)


def in_loops(jaxpr: Jaxpr, change: Callable[[Jaxpr], tuple[Jaxpr, Constants]]) -> tuple[Jaxpr, Constants]:
    """A step with the bodies of its loops changed, and the constants that these now read.

    Args:
      change: from a body to another one, and to the constants that are its first inputs in addition.
    """
    eqns: list[JaxprEqn] = []
    constants: Constants = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            body, hoisted = change(eqn.params["body"])
            eqn = eqn.replace(invars=[*hoisted, *eqn.invars], params={**eqn.params, "body": body})
            eqn = eqn.replace(effects=body.effects)
            constants |= hoisted
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns, invars=[*constants, *jaxpr.invars]), constants


def with_marks_open(body: Jaxpr) -> tuple[Jaxpr, Constants]:
    """A loop's body without calls and rematerialised functions that have marks inside.

    What they keep for the backward, and compute again, is then in the order in which it belongs to stages.
    """
    constants: Constants = {}
    while True:
        body, hoisted = inline_calls(body, has_mark)
        constants = {**hoisted, **constants}
        if not any(is_remat(eqn) and has_mark(eqn) for eqn in body.eqns):
            return body, constants
        body = with_remat_open(body, has_mark)


def with_remat_open(body: Jaxpr, should_open: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """The jaxpr with rematerialised functions replaced by their equations."""

    def opened(eqn: JaxprEqn) -> Jaxpr | None:
        return eqn.params["jaxpr"] if is_remat(eqn) and should_open(eqn) else None

    outvars = list(body.outvars)
    return with_eqns(body, inlined_eqns(body.eqns, opened), outvars=outvars)


def with_calls_open(jaxpr: Jaxpr) -> tuple[Jaxpr, Constants]:
    """The jaxpr without calls, also in branches of conditionals, which then have variables of their own.

    Linear systems are solved by the equations that do so.
    """
    jaxpr, constants = inline_calls(jaxpr, lambda eqn: called(eqn) is not None)
    while any(solution(eqn) for eqn in jaxpr.eqns):
        opened = with_eqns(jaxpr, inlined_eqns(jaxpr.eqns, solution))
        jaxpr, hoisted = inline_calls(opened, lambda eqn: called(eqn) is not None)
        constants = {**hoisted, **constants}
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            branches = tuple(map(_with_open_branch, eqn.params["branches"]))
            eqn = eqn.replace(params={**eqn.params, "branches": branches})
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns), constants


def _with_open_branch(branch: ClosedJaxpr) -> ClosedJaxpr:
    jaxpr, hoisted = with_calls_open(branch.jaxpr)
    if hoisted:  # branches that close over arrays stay as they are
        jaxpr = branch.jaxpr
    return ClosedJaxpr(with_own_variables(jaxpr), branch.consts)


def with_own_variables(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with variables of its own.

    JAX has the same branch of two conditionals once, and the same loop in two calls of a compiled function.
    """
    renamed: dict[Var, Atom] = {var: Var(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)}
    eqns = []
    for eqn in jaxpr.eqns:
        outvars = [var if is_dropped(var) else Var(var.aval) for var in eqn.outvars]
        eqns.append(substitute(eqn, renamed).replace(outvars=outvars))
        renamed.update(zip(eqn.outvars, outvars, strict=True))
    return with_eqns(
        jaxpr,
        eqns,
        constvars=[renamed[var] for var in jaxpr.constvars],
        invars=[renamed[var] for var in jaxpr.invars],
        outvars=[lookup(atom, renamed) for atom in jaxpr.outvars],
    )
