"""Values that equations before a position hand over to those behind it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.canonical import called
from mpmd.compiler.jaxprs.cost import is_cheap
from mpmd.compiler.jaxprs.equations import free_variables, is_inexact, operands
from mpmd.compiler.jaxprs.work import nbytes


def from_inputs(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """The values that every reader can compute from inputs, with the equations that compute them.

    They are cheap, and depend on one input alone, such as a cast of a weight, or on whole numbers and keys,
    such as masks and dropout's random numbers. Values of several inputs, such as an embedding or its sum with
    another, are the work of a layer. A value that no equation makes is an input.
    """
    inputs = free_variables(jaxpr.eqns)
    depends: dict[Var, frozenset[Var]] = {var: frozenset({var}) for var in inputs}
    makers: dict[Var, JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        read = operands(eqn)
        if not _is_cheap(eqn) or any(var not in depends for var in read):
            continue
        leaves = frozenset().union(*(depends[var] for var in read))
        if len(leaves) > 1 and any(map(is_inexact, leaves)):
            continue
        depends.update(dict.fromkeys(eqn.outvars, leaves))
        makers.update(dict.fromkeys(eqn.outvars, eqn))
    return makers


def _is_cheap(eqn: JaxprEqn) -> bool:
    """As ``is_cheap``, for a function as its user wrote it, in which not all calls are opened."""
    callee = called(eqn)
    return is_cheap(eqn) if callee is None else all(map(_is_cheap, callee.jaxpr.eqns))


class Crossing:
    """The values that are handed over at each position of a jaxpr.

    Attributes:
      from_inputs: the values that readers can compute from inputs, which are not handed over.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.from_inputs: Mapping[Var, JaxprEqn] = from_inputs(jaxpr)
        made_at: dict[Var, int] = {}
        last_read: dict[Var, int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            last_read.update((var, i) for var in operands(eqn) if var in made_at)
            made_at.update((var, i) for var in eqn.outvars if var not in self.from_inputs)
        self._vars = list(last_read)
        self._made_at = np.array([made_at[var] for var in self._vars], int)
        self._last_read = np.array(list(last_read.values()), int)
        sizes = [nbytes(var) for var in self._vars]
        self._bytes = self._sums_by_position(sizes, len(jaxpr.eqns))
        self._count = self._sums_by_position([1] * len(sizes), len(jaxpr.eqns))

    def _sums_by_position(self, amounts: Sequence[int], length: int) -> list[int]:
        changes = [0] * (length + 1)
        for amount, made_at, last in zip(amounts, self._made_at, self._last_read, strict=True):
            changes[made_at + 1] += amount
            changes[last + 1] -= amount
        return list(itertools.accumulate(changes))

    def bytes_at(self, position: int) -> int | None:
        """Bytes handed over before an equation; ``None`` without a value, where no layer can end."""
        return self._bytes[position] if self._count[position] else None

    def bytes_between(self, start: int, stop: int) -> list[int | None]:
        return [self.bytes_at(position) for position in range(start, stop + 1)]

    def at(self, position: int) -> list[Var]:
        indices = np.flatnonzero((self._made_at < position) & (position <= self._last_read))
        return [self._vars[i] for i in indices]
