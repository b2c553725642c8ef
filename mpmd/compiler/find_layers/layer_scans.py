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
    return _multiplies(scan.body, set(scan.body.invars[scan.carry]), weights)[0]


def _multiplies(jaxpr: Jaxpr, carried: set[Var], weights: set[Var]) -> tuple[bool, set[Var], set[Var]]:
    """Whether a value of ``carried`` is multiplied by a value of weights alone; and the values of both."""
    carried, weights = set(carried), set(weights)
    for eqn in jaxpr.eqns:
        read = operands(eqn)
        of_carried = any(var in carried for var in read)
        of_weights = any(var in weights for var in read)
        if of_carried and of_weights and eqn.primitive.name in PRODUCTS:
            return True, carried, weights
        for inner in subjaxprs(eqn):
            if len(inner.invars) == len(eqn.invars):
                operands_of = zip(inner.invars, eqn.invars, strict=True)
                pairs = [(a, b) for a, b in operands_of if isinstance(b, Var)]  # no literals
                within = _multiplies(
                    inner,
                    {a for a, b in pairs if is_among(b, carried)},
                    {a for a, b in pairs if is_among(b, weights)},
                )
                if within[0]:
                    return within
        if of_carried:
            carried.update(eqn.outvars)
        elif of_weights:
            weights.update(eqn.outvars)
    return False, carried, weights
