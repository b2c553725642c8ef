"""Rewrites a step outside of its loops and in the bodies of its loops."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.core import Jaxpr, JaxprEqn

from mpmd.compiler.jaxprs.equations import with_eqns
from mpmd.language.reduce import treduce_p


def in_loops(jaxpr: Jaxpr, change: Callable[[Jaxpr], Jaxpr]) -> Jaxpr:
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            body = change(eqn.params["body"])
            eqn = eqn.replace(params={**eqn.params, "body": body}, effects=body.effects)
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns)


def everywhere(jaxpr: Jaxpr, change: Callable[[Jaxpr], Jaxpr]) -> Jaxpr:
    """A step that is changed after the bodies of its loops are."""
    return change(in_loops(jaxpr, change))
