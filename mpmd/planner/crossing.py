"""What is handed over from the equations before a position to those behind it."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.cost import is_cheap
from mpmd.compiler.jaxprs.equations import aval_of, is_dropped, operands
from mpmd.compiler.jaxprs.work import nbytes

_Leaves = frozenset[Var]


def from_inputs(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """The values that whoever reads them can make of inputs, and the equations that make them.

    So it is for what is cheap and depends on one input alone, such as a cast of a weight, or on whole numbers
    and keys, such as masks and dropout's random numbers. What mixes several inputs, such as an embedding or
    its sum with another, is the work of a layer.
    """
    depends: dict[Var, _Leaves] = {var: frozenset({var}) for var in (*jaxpr.constvars, *jaxpr.invars)}
    made: dict[Var, JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        read = operands(eqn)
        if not is_cheap(eqn) or any(var not in depends for var in read):
            continue
        leaves = frozenset().union(*(depends[var] for var in read))
        if len(leaves) > 1 and any(map(_is_inexact, leaves)):
            continue
        depends.update(dict.fromkeys(eqn.outvars, leaves))
        made.update(dict.fromkeys(eqn.outvars, eqn))
    return made


def _is_inexact(var: Var) -> bool:
    return jnp.issubdtype(aval_of(var).dtype, jnp.inexact)


class Crossing:
    """What is handed over at each position of a jaxpr.

    Attributes:
      from_inputs: what readers can make of inputs, which is not handed over.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.from_inputs: Mapping[Var, JaxprEqn] = from_inputs(jaxpr)
        self._made: dict[Var, int] = {}
        self._last_read: dict[Var, int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for var in operands(eqn):
                if var in self._made:
                    self._last_read[var] = i
            self._made.update((var, i) for var in eqn.outvars if not self._is_not_handed_over(var))
        self._bytes = [0] * (len(jaxpr.eqns) + 1)
        self._count = [0] * (len(jaxpr.eqns) + 1)
        for var, last in self._last_read.items():
            first = self._made[var] + 1
            for at, sign in ((first, 1), (last + 1, -1)):
                self._bytes[at] += sign * nbytes(var)
                self._count[at] += sign
        for at in range(1, len(self._bytes)):
            self._bytes[at] += self._bytes[at - 1]
            self._count[at] += self._count[at - 1]

    def _is_not_handed_over(self, var: Var) -> bool:
        return is_dropped(var) or var in self.from_inputs

    def bytes_at(self, position: int) -> int | None:
        """Bytes handed over before an equation; ``None`` if it is nothing, so that no layer can end there."""
        return self._bytes[position] if self._count[position] else None

    def at(self, position: int) -> list[Var]:
        """The values handed over before an equation, in the order in which they are made."""
        return [var for var, made in self._made.items() if made < position <= self._last_read.get(var, -1)]
