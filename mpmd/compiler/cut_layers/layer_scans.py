"""Reads a scan over values in layer ranges."""

from __future__ import annotations

import dataclasses

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import Atom, operands
from mpmd.compiler.jaxprs.scans import ScanOperands, scan_operands


@dataclasses.dataclass(frozen=True)
class LayerScan:
    """A scan that is cut into a scan for each part of the arrays that it scans over.

    Attributes:
      eqn: the scan.
      operands: the roles of the scan's operands: constants, carried values and arrays to scan over.
      added_to: indices of the carried values that iterations only add to, such as the gradient of a weight
        that all layers share. Each part computes its own sum, and the sums are added.
      unchanged: indices of the carried values that are the same in all iterations.
    """

    eqn: JaxprEqn
    operands: ScanOperands
    added_to: frozenset[int]
    unchanged: frozenset[int]

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    @property
    def stacked(self) -> list[Atom]:
        """The arrays that the scan reads one row of in each iteration, and the arrays that it stacks."""
        return [*self.eqn.invars[self.operands.xs], *self.eqn.outvars[self.operands.num_carry :]]


def read_scan(eqn: JaxprEqn) -> LayerScan:
    body: Jaxpr = eqn.params["jaxpr"].jaxpr
    roles = scan_operands(eqn)
    before = body.invars[roles.carry]
    return LayerScan(
        eqn,
        roles,
        frozenset(i for i, var in enumerate(before) if _is_only_added_to(body, var, body.outvars[i])),
        frozenset(i for i, var in enumerate(before) if body.outvars[i] is var),
    )


def _is_only_added_to(jaxpr: Jaxpr, before: Var, after: Atom) -> bool:
    """Whether ``after`` is ``before`` plus summands, and ``before`` and each sum in between have a single
    reader."""
    read = [var for eqn in jaxpr.eqns for var in operands(eqn)] + list(jaxpr.outvars)
    reader = {var: eqn for eqn in jaxpr.eqns for var in operands(eqn)}
    var = before
    while read.count(var) == 1 and var in reader:
        eqn = reader[var]
        if eqn.primitive.name not in ("add", "add_any"):
            return False
        var = eqn.outvars[0]
    return var is after and var is not before and read.count(var) == 1
