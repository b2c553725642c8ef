"""Which values are combined with one another element by element."""

from __future__ import annotations

from collections.abc import Iterable

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.cost import is_elementwise
from mpmd.compiler.jaxprs.equations import aval_of, operands


class Together:
    """Variables that elementwise equations combine, directly or by way of others of the same shape.

    So a weight, its gradient and what an optimizer keeps for it are together.
    """

    def __init__(self, eqns: Iterable[JaxprEqn]):
        self._parent: dict[Var, Var] = {}
        for eqn in eqns:
            if is_elementwise(eqn) and len(eqn.outvars) == 1:
                out = eqn.outvars[0]
                for var in operands(eqn):
                    if aval_of(var).shape == aval_of(out).shape != ():
                        self._parent[self.of(var)] = self.of(out)

    def of(self, var: Var) -> Var:
        """The variable that stands for all that are together with one."""
        parent = self._parent
        while parent.setdefault(var, var) is not var:
            parent[var] = parent[parent[var]]
            var = parent[var]
        return var

    @property
    def variables(self) -> list[Var]:
        """All that is known."""
        return list(self._parent)
