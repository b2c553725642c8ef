"""The record of a scan: its body, and its operands and results by the roles that they have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from jax.extend.core import Jaxpr, JaxprEqn, Var, unmapped_aval

from mpmd.compat import scan_counts, with_scan_counts
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    closed,
    free_variables,
    make_jaxpr,
    variables,
)


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
        return dict(zip(self.body.invars[positions], self.eqn.invars[positions], strict=True))

    @property
    def carried(self) -> list[tuple[Var, Atom]]:
        """The carried values, each before and after an iteration."""
        return list(zip(self.body.invars[self.carry], self.body.outvars, strict=False))

    @property
    def stacked(self) -> list[tuple[Var, Atom]]:
        results = zip(self.eqn.outvars, self.body.outvars, strict=True)
        return list(results)[self.num_carry :]

    def part(
        self,
        eqns: Sequence[JaxprEqn],
        results: Set[int],
        extra_inputs: Mapping[Var, Atom] | None = None,
        extra_outputs: Sequence[Var] = (),
        extra_constants: Mapping[Var, Atom] | None = None,
    ) -> tuple[JaxprEqn, list[Var]]:
        """A scan of the body's ``eqns`` for ``results``, and the variables of the stacked extras.

        Args:
          results: indices of the scan's results.
          extra_inputs: variables of the body that are read from stacked values.
          extra_outputs: variables of the body to stack.
          extra_constants: variables of the body that are the same in all iterations.
        """
        kept = sorted(results)
        outputs = [*(self.body.outvars[i] for i in kept), *extra_outputs]
        read = dict.fromkeys([*free_variables(eqns), *variables(outputs)])
        all_consts = {**self.operands(self.consts), **(extra_constants or {})}
        consts = {var: all_consts[var] for var in read if var in all_consts}
        all_xs = {**self.operands(self.xs), **(extra_inputs or {})}
        xs = {var: atom for var, atom in all_xs.items() if var in read}
        carry = {var: atom for i, (var, atom) in enumerate(self.operands(self.carry).items()) if i in results}
        body = make_jaxpr([*consts, *carry, *xs], eqns, outputs)
        extras = [Var(unmapped_aval(self.length, 0, aval_of(var))) for var in extra_outputs]
        counts = len(consts), len(carry), len(xs), len(outputs) - len(carry)
        part = self.eqn.replace(
            invars=[*consts.values(), *carry.values(), *xs.values()],
            outvars=[*(self.eqn.outvars[i] for i in kept), *extras],
            params={**with_scan_counts(self.eqn.params, *counts), "jaxpr": closed(body)},
            effects=body.effects,
        )
        return part, extras
