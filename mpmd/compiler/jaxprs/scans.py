"""The record of a scan: its body, and its operands and results by the roles that they have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compat import scan_counts
from mpmd.compiler.jaxprs.equations import Atom


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """A scan equation. Its results are the carried values, then the stacked arrays.

    Attributes:
      eqn: the equation.
      body: computes one iteration.
      consts: the positions of operands that each iteration reads whole.
      carry: the positions of operands that the first iteration reads; each later iteration reads the values
        that the previous iteration computes.
      xs: the positions of operands of which each iteration reads one row.
    """

    eqn: JaxprEqn
    body: Jaxpr
    consts: slice
    carry: slice
    xs: slice

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Scan:
        num_consts, num_carry = scan_counts(eqn.params)
        first_row = num_consts + num_carry
        positions = slice(0, num_consts), slice(num_consts, first_row), slice(first_row, len(eqn.invars))
        return cls(eqn, eqn.params["jaxpr"].jaxpr, *positions)

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    @property
    def num_carry(self) -> int:
        return self.carry.stop - self.carry.start

    def operands(self, positions: slice) -> dict[Var, Atom]:
        """The variables of the body at ``positions``, each with the scan's operand."""
        return dict(zip(self.body.invars[positions], self.eqn.invars[positions], strict=True))

    @property
    def carried(self) -> list[tuple[Var, Atom]]:
        """The carried values, each before and after an iteration."""
        return list(zip(self.body.invars[self.carry], self.body.outvars, strict=False))

    @property
    def stacked(self) -> list[tuple[Var, Atom]]:
        results = zip(self.eqn.outvars, self.body.outvars, strict=True)
        return list(results)[self.num_carry :]


def computed(values: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns the results of the body of a ``lax.scan``, with each result that is an input copied.

    ``lax.scan`` leaves a result that its body returns unchanged out of the equation, which would then have
    fewer results than the body.
    """
    input_ids = set(map(id, inputs))
    return [jnp.copy(value) if id(value) in input_ids else value for value in values]
