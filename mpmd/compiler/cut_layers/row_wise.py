"""Finds the arrays of which each iteration of a scan reads and changes rows of its own alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.cut_layers.accesses import Access, Rows, access_of
from mpmd.compiler.jaxprs.equations import Atom, operands, shape_of
from mpmd.compiler.jaxprs.scans import ScanOperands
from mpmd.language.annotate import mark_of


@dataclasses.dataclass(frozen=True)
class RowWise:
    """The arrays that the body of a scan reads and changes row by row.

    Attributes:
      rows: for each array that the body is given, and each one that it makes of zeros, which rows iterations
        have.
      source: for variables of the body, the array that they are, with some rows changed perhaps.
      accesses: the equations that take or change rows, by ``id``.
    """

    rows: Mapping[Var, Rows]
    source: Mapping[Var, Var]
    accesses: Mapping[int, Access]


def row_wise(
    body: Jaxpr,
    roles: ScanOperands,
    eqns: Sequence[JaxprEqn],
    zeros: Collection[Var],
    integers: Mapping[Var, np.ndarray],
    length: int,
) -> RowWise:
    """Reads the body of a scan.

    Args:
      eqns: the body's equations.
      zeros: variables of the body that are arrays of zeros.
      integers: those of the body, for each element of what is scanned over.
      length: the number of iterations.
    """
    accesses = {id(eqn): access for eqn in eqns if (access := access_of(eqn, integers, length))}
    arrays = {var for var in body.invars[: roles.carry.stop] if shape_of(var)}
    arrays.difference_update(*(_read_otherwise(eqn, accesses) for eqn in eqns))
    refused: set[Var] = set()
    while True:  # an array that is read otherwise may have been added to others
        reading = _Reading(body, roles, accesses, zeros, arrays - refused, refused)
        reading.walk(eqns)
        if reading.refused <= refused:
            return RowWise(reading.rows, reading.source, accesses)
        refused |= reading.refused


def _read_otherwise(eqn: JaxprEqn, accesses: Mapping[int, Access]) -> list[Var]:
    """The operands that an equation can only read whole."""
    if eqn.primitive.name in ("add", "add_any") or mark_of(eqn):
        return []
    return operands(eqn)[1:] if id(eqn) in accesses else operands(eqn)


class _Reading:
    def __init__(
        self,
        body: Jaxpr,
        roles: ScanOperands,
        accesses: Mapping[int, Access],
        zeros: Collection[Var],
        arrays: Collection[Var],
        refused: Collection[Var],
    ):
        self._body = body
        self._roles = roles
        self._accesses = accesses
        self._zeros = zeros
        self._arrays = arrays
        self.rows: dict[Var, Rows] = {}
        self.source: dict[Var, Var] = {var: var for var in arrays}
        self.refused: set[Var] = set(refused)

    def walk(self, eqns: Sequence[JaxprEqn]) -> None:
        for eqn in eqns:
            self._read(eqn)
        carry = dict(enumerate(self._body.invars[self._roles.carry]))
        for i, atom in enumerate(self._body.outvars):
            before = carry.get(i) if carry.get(i) in self._arrays else None
            if (after := self._source(atom)) is not before:
                self.refused.update(var for var in (after, before) if var is not None)
        self.refused.update(var for var in self._arrays if var not in self.rows)

    def _source(self, atom: Atom) -> Var | None:
        return self.source.get(atom) if isinstance(atom, Var) else None

    def _read(self, eqn: JaxprEqn) -> None:
        sources = [self._source(atom) for atom in eqn.invars]
        arrays = [source for source in sources if source is not None]
        access = self._accesses.get(id(eqn))
        if access is not None and sources[0] is not None:
            self._settle(sources[0], access.rows)
        if access is not None and not any(sources[1:]):
            if sources[0] is not None:
                if access.update is not None:
                    self.source[eqn.outvars[0]] = sources[0]
                return
            if access.update is not None and self._is_new(eqn):
                self._define(eqn.outvars[0], access.rows)
                return
        if not arrays:
            return
        if eqn.primitive.name in ("add", "add_any") and len(arrays) == 2:
            self._add(eqn.outvars[0], *arrays)
        elif mark_of(eqn) and len(arrays) < len(sources):
            pairs = zip(eqn.outvars, sources, strict=True)
            self.source |= {var: source for var, source in pairs if source is not None}
        else:
            self.refused.update(arrays)

    def _is_new(self, eqn: JaxprEqn) -> bool:
        """Whether an equation makes an array of zeros but for some rows."""
        first = eqn.invars[0]
        is_zero = isinstance(first, Var) and first in self._zeros
        return is_zero and eqn.outvars[0] not in self.refused

    def _add(self, var: Var, left: Var, right: Var) -> None:
        """The sum of an array and of what is zero but for the rows of an iteration."""
        old = [source for source in (left, right) if source in self._arrays]
        new = [source for source in (left, right) if source not in self._arrays]
        if not new or (var in self.refused and not old):
            self.refused.update((left, right))
        elif old:
            self._settle(old[0], self.rows[new[0]])
            self.source[var] = old[0]
        else:
            self._settle(left, self.rows[right])
            self._define(var, self.rows[left])

    def _define(self, var: Var, rows: Rows) -> None:
        self.source[var], self.rows[var] = var, rows

    def _settle(self, source: Var, rows: Rows) -> None:
        if self.rows.setdefault(source, rows) != rows:
            self.refused.add(source)
