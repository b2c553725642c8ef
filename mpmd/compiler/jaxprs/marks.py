"""Marks in jaxprs, at any depth: which there are, and jaxprs without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import Atom, any_inside, closed, lookup, subjaxprs, substitute, with_eqns
from mpmd.language.annotate import Mark, mark_of, mark_p
from mpmd.language.reduce import treduce_p


def has_mark(eqn: JaxprEqn) -> bool:
    """Whether a mark is inside a jaxpr that the equation calls."""
    return any_inside(eqn, mark_p)


def marks_in(jaxpr: Jaxpr) -> Iterator[tuple[JaxprEqn, Mark]]:
    """Yields the marks in a jaxpr and in the bodies of its equations."""
    for eqn in jaxpr.eqns:
        if mark := mark_of(eqn):
            yield eqn, mark
        for inner in subjaxprs(eqn):
            yield from marks_in(inner)


def without_marks(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with the results of marks replaced by their operands, at any depth outside of loops."""
    renamed: dict[Var, Atom] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        eqn = substitute(eqn, renamed)
        if mark_of(eqn):
            renamed.update(zip(eqn.outvars, eqn.invars, strict=True))
            continue
        if any_inside(eqn, mark_p) and eqn.primitive is not treduce_p:
            eqn = eqn.replace(params={name: _without_marks(value) for name, value in eqn.params.items()})
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns, outvars=[lookup(atom, renamed) for atom in jaxpr.outvars])


def _without_marks(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return closed(without_marks(value.jaxpr))
    if isinstance(value, Jaxpr):
        return without_marks(value)
    return tuple(map(_without_marks, value)) if isinstance(value, tuple) else value
