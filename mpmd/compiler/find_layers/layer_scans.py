"""Tells scans over layers from scans over time, chunks or data."""

from __future__ import annotations

from collections.abc import Container

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import is_among, operands, subjaxprs
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.work import PRODUCTS


def is_layer_scan(eqn: JaxprEqn, computed: Container[Var]) -> bool:
    """Whether an equation is a scan whose iterations are layers.

    They are if carried values are multiplied by weights that are scanned over. A scan over time or over
    chunks has its weights among its constants, or scans over computed values.

    Args:
      computed: the values that are neither inputs nor derived from a single input.
    """
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
        return False
    scan = Scan.of(eqn)
    weights = {x for x, atom in scan.operands(scan.xs).items() if not is_among(atom, computed)}
    return _multiplies(scan.body, set(scan.body.invars[scan.carry]), weights)


def _multiplies(jaxpr: Jaxpr, carried: set[Var], weights: set[Var]) -> bool:
    """Whether a value that depends on ``carried`` is multiplied by a value of ``weights`` alone."""
    for eqn in jaxpr.eqns:
        read = set(operands(eqn))
        of_carried, of_weights = not read.isdisjoint(carried), not read.isdisjoint(weights)
        if of_carried and of_weights and eqn.primitive.name in PRODUCTS:
            return True
        for inner in subjaxprs(eqn):
            if len(inner.invars) == len(eqn.invars):
                pairs = list(zip(inner.invars, eqn.invars, strict=True))
                within = ({a for a, b in pairs if is_among(b, those)} for those in (carried, weights))
                if _multiplies(inner, *within):
                    return True
        if of_carried:
            carried.update(eqn.outvars)
        elif of_weights:
            weights.update(eqn.outvars)
    return False
