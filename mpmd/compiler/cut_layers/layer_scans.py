"""Reads a scan over values in layer ranges."""

from __future__ import annotations

import dataclasses

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import Atom, operands
from mpmd.compiler.jaxprs.scans import ScanOperands, scan_operands


@dataclasses.dataclass(frozen=True)
class LayerScan:
    """A scan that is cut into one for each part of what it scans over.

    Attributes:
      eqn: the scan.
      operands: which of its operands are what.
      added_to: which of the carried values are only added to, such as the gradient of a weight that all
        layers share. Each part sums its own, and the sums are added.
      unchanged: which are the same in all iterations.
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
        """The arrays that it scans over, and those that it stacks."""
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
    """Whether ``after`` is ``before`` and summands, and nothing else reads ``before`` or a sum in between."""
    read = [var for eqn in jaxpr.eqns for var in operands(eqn)] + list(jaxpr.outvars)
    reader = {var: eqn for eqn in jaxpr.eqns for var in operands(eqn)}
    var = before
    while read.count(var) == 1 and var in reader:
        eqn = reader[var]
        if eqn.primitive.name not in ("add", "add_any"):
            return False
        var = eqn.outvars[0]
    return var is after and var is not before and read.count(var) == 1
