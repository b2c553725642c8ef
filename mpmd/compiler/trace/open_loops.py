"""Finds the loops whose number of microbatches a step leaves open."""

from __future__ import annotations

from jax.extend.core import Jaxpr, Var

from mpmd.compiler.jaxprs.equations import operands
from mpmd.language.pieces import open_rows_p
from mpmd.language.reduce import treduce_p


def find_open_loops(jaxpr: Jaxpr) -> frozenset[int]:
    """Returns the decision indices of loops that read rows which are cut into an open number of microbatches.

    What a loop returns is read by a later loop as any other value, whatever the number.
    """
    rows: set[Var] = set()
    found: set[int] = set()
    for eqn in jaxpr.eqns:
        reads_rows = not rows.isdisjoint(operands(eqn))
        if eqn.primitive is treduce_p:
            found |= {eqn.params["number"]} if reads_rows else set()
        elif reads_rows or eqn.primitive is open_rows_p:
            rows.update(eqn.outvars)
    return frozenset(found)
