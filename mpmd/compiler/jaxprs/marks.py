"""Finds and removes marks in jaxprs, at any depth, and changes the bodies of microbatch loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var

from mpmd.compiler.jaxprs.equations import (
    Atom,
    all_eqns,
    are_same,
    as_called,
    contains,
    lookup,
    subjaxprs,
    substitute,
    with_eqns,
    with_params,
)
from mpmd.compiler.jaxprs.source import line_of
from mpmd.language.annotate import Mark, mark_of, mark_p, mark_text
from mpmd.language.reduce import treduce_p


def has_mark(eqn: JaxprEqn) -> bool:
    return any(contains(inner, mark_p) for inner in subjaxprs(eqn))


def marks_in(jaxpr: Jaxpr) -> Iterator[tuple[JaxprEqn, Mark]]:
    return ((eqn, mark) for eqn in all_eqns(jaxpr.eqns) if (mark := mark_of(eqn)))


def first_mark(eqn: JaxprEqn) -> str:
    mark = next(mark for inner in subjaxprs(eqn) for mark, _ in marks_in(inner))
    return mark_text(mark, line_of(as_called(eqn, mark)))


def without_identities(jaxpr: Jaxpr, *primitives: Primitive) -> Jaxpr:
    """The jaxpr with the results of primitives replaced by their operands, at any depth outside of loops."""
    renamed: dict[Var, Atom] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        eqn = substitute(eqn, renamed)
        if eqn.primitive in primitives:
            renamed.update(zip(eqn.outvars, eqn.invars, strict=True))
        elif eqn.primitive is treduce_p:
            eqns.append(eqn)
        else:
            eqns.append(with_params(eqn, (Jaxpr,), lambda inner: without_identities(inner, *primitives)))
    if are_same(eqns, jaxpr.eqns):
        return jaxpr
    return with_eqns(jaxpr, eqns, outvars=[lookup(atom, renamed) for atom in jaxpr.outvars])


def closed_over(loop: JaxprEqn) -> dict[Var, Atom]:
    """The outer values that a microbatch loop reads, by the variables that stand for them in its body."""
    count = len(loop.invars) - len(loop.outvars)
    return dict(zip(loop.params["body"].invars[:count], loop.invars, strict=False))


def in_loops(jaxpr: Jaxpr, change: Callable[[Jaxpr], Jaxpr]) -> Jaxpr:
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            body = change(eqn.params["body"])
            eqn = eqn.replace(params={**eqn.params, "body": body}, effects=body.effects)
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns)


def everywhere(jaxpr: Jaxpr, change: Callable[[Jaxpr], Jaxpr]) -> Jaxpr:
    """Applies ``change`` to the bodies of a step's loops, and then to the step."""
    return change(in_loops(jaxpr, change))
