"""Writes the body of a scan for the rows that an iteration has of arrays, in place of the arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.cut_layers.accesses import Access
from mpmd.compiler.cut_layers.row_wise import RowWise
from mpmd.compiler.jaxprs.equations import Atom, aval_of, lookup, shape_of, substitute
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.language.annotate import mark_of

_COMBINED: dict[str, Callable] = {
    "scatter-add": lax.add,
    "scatter-max": lax.max,
    "scatter-min": lax.min,
    "scatter-mul": lax.mul,
}
"""The functions of old values and an update's; other updates replace the old ones."""


class Blocks:
    """The equations for the rows of one iteration.

    Attributes:
      inputs: for each array that the body is given, the variable of its rows; none of what is zero at first.
    """

    def __init__(self, by_rows: RowWise, arrays: Collection[Var], zeros: Collection[Var]):
        self.eqns: list[JaxprEqn] = []
        self.inputs = {var: self._rows_of(var, by_rows) for var in arrays if var not in zeros}
        self._by_rows = by_rows
        self._blocks: dict[Var, Atom | None] = {var: self.inputs.get(var) for var in arrays}  # None: zeros
        self._renamed: dict[Var, Atom] = {}

    @staticmethod
    def _rows_of(var: Var, by_rows: RowWise) -> Var:
        aval: Any = var.aval
        return Var(aval.update(shape=by_rows.rows[var].block(shape_of(var))))

    def of(self, atom: Atom) -> Atom | None:
        """The rows of an array; ``None`` if they are zero."""
        assert isinstance(atom, Var), "a literal has no rows"
        return self._blocks[atom]

    def value(self, atom: Atom) -> Atom:
        """Any other value of the body."""
        return lookup(atom, self._renamed)

    def add(self, eqn: JaxprEqn) -> None:
        """Adds what takes the place of an equation of the body."""
        access, tracked = self._by_rows.accesses.get(id(eqn)), self._by_rows.source
        if access is not None and eqn.outvars[0] in tracked:
            self._blocks[eqn.outvars[0]] = self._changed(access)
        elif access is not None and access.update is None and self._is_tracked(eqn.invars[0]):
            self._renamed[eqn.outvars[0]] = self._taken(access)
        elif mark_of(eqn):
            self._mark(eqn)
        elif any(var in tracked for var in eqn.outvars):
            self._blocks[eqn.outvars[0]] = self._sum(eqn)
        else:
            self.eqns.append(substitute(eqn, self._renamed))

    def _is_tracked(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom in self._by_rows.source

    def _taken(self, access: Access) -> Atom:
        eqn, dim = access.eqn, access.rows.dim
        target, stop = shape_of(eqn.outvars[0]), access.first + access.size

        def take(block, *indices):
            rows = some_rows(block, access.first, stop, dim)
            if not access.is_whole:
                starts = [0 if d == dim else index for d, index in enumerate(indices)]
                rows = lax.dynamic_slice(rows, starts, eqn.params["slice_sizes"])
            return [rows.reshape(target)]

        indices = [] if access.is_whole else eqn.invars[1:]
        return self._traced(take, [self._block(eqn.invars[0], access), *indices], eqn)

    def _changed(self, access: Access) -> Atom:
        eqn, rows = access.eqn, access.rows
        assert access.update is not None
        first, size, dim = access.first, access.size, rows.dim
        shape = rows.block(shape_of(eqn.invars[0]))
        combine = _COMBINED.get(eqn.primitive.name)
        is_all = access.is_whole and size == rows.number

        def replace(update):
            return [update.reshape(shape)]

        def change(block, update, *indices):
            if not access.is_whole:
                starts = [first if d == dim else index for d, index in enumerate(indices)]
                return [lax.dynamic_update_slice(block, update, starts)]
            update = update.reshape(*shape[:dim], size, *shape[dim + 1 :])
            if combine is not None:
                update = combine(some_rows(block, first, first + size, dim), update)
            return [with_some_rows(block, update, first, dim)]

        is_zero = self._blocks.get(_variable(eqn.invars[0])) is None
        if is_all and (combine is None or (is_zero and combine is lax.add)):
            return self._traced(replace, [eqn.invars[access.update]], eqn)
        indices = [] if access.is_whole else eqn.invars[2:]
        block = self._block(eqn.invars[0], access)
        return self._traced(change, [block, eqn.invars[access.update], *indices], eqn)

    def _sum(self, eqn: JaxprEqn) -> Atom | None:
        left, right = (self.of(atom) for atom in eqn.invars)
        if left is None or right is None:
            return right if left is None else left
        return self._traced(lambda a, b: [lax.add(a, b)], [left, right], eqn)

    def _mark(self, eqn: JaxprEqn) -> None:
        """The rows of an iteration pass no mark."""
        kept = []
        for i, (atom, var) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
            if var in self._by_rows.source:
                self._blocks[var] = self.of(atom)
            else:
                kept.append(i)
        invars, outvars = [eqn.invars[i] for i in kept], [eqn.outvars[i] for i in kept]
        self.eqns.append(substitute(eqn.replace(invars=invars, outvars=outvars), self._renamed))

    def _block(self, atom: Atom, access: Access) -> Atom:
        """The rows of an array that an equation takes or changes."""
        var = _variable(atom)
        if (block := self._blocks.get(var)) is not None:
            return block
        shape, dtype = access.rows.block(shape_of(var)), aval_of(var).dtype
        return self._traced(lambda: [jnp.zeros(shape, dtype)], [], access.eqn)

    def _traced(self, fun: Callable, inputs: Sequence[Atom], like: JaxprEqn) -> Atom:
        eqns, results = traced_eqns(fun, [self.value(atom) for atom in inputs])
        self.eqns += [eqn.replace(source_info=like.source_info) for eqn in eqns]
        return results[0]


def some_rows(array: Any, start: int, stop: int, dim: int) -> Any:
    """The rows of an array from ``start`` to ``stop``."""
    return array if stop - start == array.shape[dim] else lax.slice_in_dim(array, start, stop, axis=dim)


def with_some_rows(array: Any, rows: Any, start: int, dim: int) -> Any:
    """The array with other rows from ``start`` on."""
    size, stop = array.shape[dim], start + rows.shape[dim]
    before = [lax.slice_in_dim(array, 0, start, axis=dim)] if start else []
    after = [lax.slice_in_dim(array, stop, size, axis=dim)] if stop < size else []
    return lax.concatenate([*before, rows, *after], dim) if before or after else rows


def _variable(atom: Atom) -> Var:
    assert isinstance(atom, Var), "a literal has no rows"
    return atom
