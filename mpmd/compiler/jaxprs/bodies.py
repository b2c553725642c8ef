"""Rewrites the bodies of loops, and inlines rematerialised functions that have marks inside."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.core import Jaxpr, JaxprEqn

from mpmd.compiler.jaxprs.equations import with_eqns
from mpmd.compiler.jaxprs.marks import has_mark
from mpmd.compiler.jaxprs.remat import without_remat
from mpmd.language.reduce import treduce_p


def in_loops(jaxpr: Jaxpr, change: Callable[[Jaxpr], Jaxpr]) -> Jaxpr:
    """A step with the bodies of its loops changed."""
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            body = change(eqn.params["body"])
            eqn = eqn.replace(params={**eqn.params, "body": body}, effects=body.effects)
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns)


def with_marks_open(body: Jaxpr) -> Jaxpr:
    """Returns a loop's body with rematerialised functions that have marks inside inlined.

    The order of the inlined equations, kept and recomputed ones, then follows the order of the stages.
    """
    return with_remat_open(body, has_mark)


def with_remat_open(body: Jaxpr, should_open: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """The jaxpr with rematerialised functions replaced by their equations."""
    return with_eqns(body, without_remat(body.eqns, should_open))
