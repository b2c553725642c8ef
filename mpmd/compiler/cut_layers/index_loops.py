"""Rewrites loops that index arrays by the loop counter as scans over those arrays.

``fori_loop(0, L, lambda i, h: layer(jax.tree.map(lambda w: w[i], params), h), h)`` is a scan that carries a
counter and takes a row of each array in each iteration; its backward adds each gradient to a row of an array
that it carries. Both are written anew as scans over the rows, which stack the new rows, if there are any.
What iterations count is no longer carried, but an element of a range.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.interpreters import partial_eval

from mpmd.compiler.cut_layers.accesses import Rows, takes_counted_rows
from mpmd.compiler.cut_layers.integers import Integers, Iterated
from mpmd.compiler.cut_layers.row_blocks import Blocks, some_rows, with_some_rows
from mpmd.compiler.cut_layers.row_wise import RowWise, row_wise
from mpmd.compiler.jaxprs.equations import (
    Atom,
    any_inside,
    aval_of,
    closed,
    is_dropped,
    lookup,
    make_jaxpr,
    operands,
    shape_of,
    size,
    substitute,
    with_eqns,
)
from mpmd.compiler.jaxprs.remat import without_remat
from mpmd.compiler.jaxprs.scan_parts import named
from mpmd.compiler.jaxprs.scans import ScanOperands, computed, scan_operands, without_copies
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.errors import PerformanceWarning
from mpmd.language.annotate import mark_p
from mpmd.language.reduce import treduce_p
from mpmd.util.warn import warn_user

_INDEXED = frozenset(
    """
    dynamic_slice dynamic_update_slice gather scatter scatter-add scatter-max scatter-min scatter-mul
    """.split()
)


def with_rows_scanned(jaxpr: Jaxpr, constants: Mapping[Var, Any]) -> Jaxpr:
    """A step whose scans read and make arrays by rows.

    Args:
      constants: the values of the variables that it reads besides its arguments.

    Warns: ``PerformanceWarning`` for scans with marks that take rows in another order.
    """
    notes: dict[str, None] = {}
    rewritten = _with_rows_scanned(jaxpr, Integers(constants), notes)
    for message in notes:
        warn_user(message, PerformanceWarning)
    return rewritten


def _with_rows_scanned(jaxpr: Jaxpr, integers: Integers, notes: dict[str, None]) -> Jaxpr:
    renamed: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    made_by_scans: set[Var] = set()
    for eqn in jaxpr.eqns:
        eqn = substitute(eqn, renamed)
        if eqn.primitive is treduce_p:
            body = eqn.params["body"]
            inner = integers.within(body.invars, eqn.invars[: -len(eqn.outvars)])
            body = _with_rows_scanned(body, inner, notes)
            eqns.append(eqn.replace(params={**eqn.params, "body": body}))
        elif eqn.primitive.name == "scan" and (index_loop := _index_loop(eqn, integers)) is not None:
            integers.read_scan(eqn, index_loop.iterated)
            made_by_scans.update(eqn.outvars)
            eqns += index_loop.rewritten(integers, made_by_scans, renamed, notes)
        else:
            integers.read(eqn)
            eqns.append(eqn)
    return with_eqns(jaxpr, eqns, outvars=[lookup(atom, renamed) for atom in jaxpr.outvars])


def _index_loop(eqn: JaxprEqn, integers: Integers) -> _IndexLoop | None:
    """A scan that counts; ``None`` for others."""
    eqns = without_remat(eqn.params["jaxpr"].jaxpr.eqns, _takes_rows)
    iterated = integers.iterate(eqn, eqns)
    return None if iterated is None else _IndexLoop(eqn, eqns, iterated)


def _takes_rows(remat: JaxprEqn) -> bool:
    """Whether a rematerialised function takes or changes rows of its arguments."""
    body: Jaxpr = remat.params["jaxpr"]
    inputs = set(body.invars)
    return any(
        eqn.primitive.name in _INDEXED and not inputs.isdisjoint(operands(eqn)[:1])
        for eqn in without_remat(body.eqns, _takes_rows)
    )


class _IndexLoop:
    def __init__(self, eqn: JaxprEqn, eqns: Sequence[JaxprEqn], iterated: Iterated):
        self.iterated = iterated
        self._eqn = eqn
        self._eqns = eqns
        self._body: Jaxpr = eqn.params["jaxpr"].jaxpr
        self._roles = scan_operands(eqn)

    def rewritten(
        self,
        integers: Integers,
        made_by_scans: Collection[Var],
        renamed: dict[Var, Atom],
        notes: dict[str, None],
    ) -> list[JaxprEqn]:
        """The equations that take the scan's place: itself, if it takes no rows and carries no counter.

        Args:
          made_by_scans: what scans that count have made, perhaps of counters.
          renamed: gets the results that are operands.
          notes: gets what to warn of.
        """
        inner = integers.within(self._body.invars, self._eqn.invars[self._roles.consts])
        for eqn in self._eqns:
            inner.read(eqn)
        zeros = {var for eqn in self._eqns for var in eqn.outvars if inner.is_zero(var)}
        length: int = self._eqn.params["length"]
        by_rows = row_wise(self._body, self._roles, self._eqns, zeros, self.iterated.rows, length)
        outside = dict(zip(self._body.invars, self._eqn.invars, strict=True))
        arrays = [var for var in self._body.invars[: self._roles.carry.stop] if var in by_rows.rows]
        notes |= dict.fromkeys(self._other_orders(by_rows))
        counters = self._counters(made_by_scans)
        if not arrays and not counters:
            return [self._eqn]
        initial = self._body.invars[self._roles.carry]
        blocks = Blocks(
            by_rows, arrays, {var for var in arrays if var in initial and integers.is_zero(outside[var])}
        )
        for eqn in self._eqns:
            blocks.add(eqn)
        return _Rewriting(self._eqn, self._body, by_rows, blocks, counters, self.iterated).eqns(renamed)

    def _other_orders(self, by_rows: RowWise) -> Iterator[str]:
        """Of a scan with marks, what takes counted rows of an array that is not scanned over."""
        arrays = {*self._body.invars[: self._roles.carry.stop]} - by_rows.rows.keys()
        length: int = self._eqn.params["length"]
        for eqn in self._eqns if any_inside(self._eqn, mark_p) else ():
            array = next(iter(operands(eqn)), None)
            is_taken = array in arrays and takes_counted_rows(eqn, self.iterated.rows, length)
            if is_taken and array is not None and size(array) > max(shape_of(array)):
                yield (
                    f"{eqn.primitive} at {where(eqn)} takes layers of an array of shape {shape_of(array)}, "
                    "but not one after the other, or the array is also read otherwise: each group keeps all "
                    "layers. Stack them in the order in which they are applied, and scan over them"
                )

    def _counters(self, made_by_scans: Collection[Var]) -> dict[Var, range]:
        """The counters: variables of the carry, or stacked by a scan, that are elements of a range."""
        counters = {}
        for i, var in enumerate(self._body.invars[self._roles.carry]):
            if i in self.iterated.final and (values := _as_range(self.iterated.rows[var])):
                counters[var] = values
        for var, atom in zip(
            self._body.invars[self._roles.xs], self._eqn.invars[self._roles.xs], strict=True
        ):
            was_stacked = isinstance(atom, Var) and atom in made_by_scans
            known = self.iterated.rows.get(var) if was_stacked else None
            if known is not None and (values := _as_range(known)):
                counters[var] = values
        return counters


def _as_range(values: np.ndarray) -> range | None:
    """A range with these numbers, if there is one."""
    if values.ndim != 1 or values.dtype == bool:
        return None
    start, step = int(values[0]), int(values[1]) - int(values[0])
    numbers = range(start, start + step * len(values), step) if step else None
    return numbers if numbers is not None and np.array_equal(values, numbers) else None


class _Rewriting:
    """A scan over the rows of arrays, and over ranges."""

    def __init__(
        self,
        eqn: JaxprEqn,
        body: Jaxpr,
        by_rows: RowWise,
        blocks: Blocks,
        counters: Mapping[Var, range],
        iterated: Iterated,
    ):
        roles = scan_operands(eqn)
        self._length: int = eqn.params["length"]
        self._eqn = eqn
        self._by_rows = by_rows
        self._blocks = blocks
        self._counters = counters
        self._outside = dict(zip(body.invars, eqn.invars, strict=True))
        self._carried = list(enumerate(body.invars[roles.carry]))
        self._ends = body.outvars
        self._final = iterated.final
        self._kept = [i for i, var in self._carried if var not in by_rows.rows and var not in counters]
        self._changed = [i for i, var in self._carried if var in by_rows.rows and self._is_changed(i, var)]
        self._stacked = range(roles.num_carry, len(body.outvars))
        self._body, self._consts, self._xs = self._smallest(body, roles)

    def _is_changed(self, i: int, var: Var) -> bool:
        end = self._blocks.of(self._ends[i])
        return end is not None and end is not self._blocks.inputs.get(var)

    def _smallest(self, body: Jaxpr, roles: ScanOperands) -> tuple[Jaxpr, list[Var], list[Var]]:
        """The body with the constants and elements that it reads."""
        consts = [var for var in body.invars[roles.consts] if var not in self._by_rows.rows]
        carry = [body.invars[roles.carry][i] for i in self._kept]
        xs = [var for var in body.invars[roles.xs] if var not in self._counters]
        xs += [*self._counters, *self._blocks.inputs.values()]
        outvars = [self._blocks.value(self._ends[i]) for i in (*self._kept, *self._stacked)]
        outvars += [atom for i in self._changed if (atom := self._blocks.of(self._ends[i])) is not None]
        whole = make_jaxpr([*consts, *carry, *xs], self._blocks.eqns, outvars)
        is_kept = [False] * len(consts) + [True] * len(carry) + [False] * len(xs)
        smallest, used = partial_eval.dce_jaxpr(whole, [True] * len(outvars), is_kept)
        read = {var for var, flag in zip(whole.invars, used, strict=True) if flag}
        return smallest, [var for var in consts if var in read], [var for var in xs if var in read]

    def eqns(self, renamed: dict[Var, Atom]) -> list[JaxprEqn]:
        """The equations of the scan's results, but for those that are operands, which are renamed."""
        roles = scan_operands(self._eqn)
        unchanged = {i for i, var in self._carried if var in self._by_rows.rows and i not in self._changed}
        renamed |= {self._eqn.outvars[i]: self._eqn.invars[roles.carry][i] for i in unchanged}
        positions = [i for i in range(len(self._eqn.outvars)) if i not in unchanged]
        read = [var for var in self._outside if var not in self._counters]

        def run(*operands):
            results = self._results(dict(zip(read, operands, strict=True)))
            return [results[i] for i in positions]

        scans, values = traced_eqns(run, [self._outside[var] for var in read])
        names = [self._eqn.outvars[i] for i in positions]
        names = [Var(var.aval) if is_dropped(var) else var for var in names]
        scans = [without_copies(eqn) if eqn.primitive.name == "scan" else eqn for eqn in scans]
        return named([eqn.replace(source_info=self._eqn.source_info) for eqn in scans], values, names)

    def _results(self, values: Mapping[Var, Any]) -> dict[int, Any]:
        """The results by position, of the operands by the variables of the body."""
        initial = [values[self._carried[i][1]] for i in self._kept]
        fixed = [values[var] for var in self._consts]
        sources = {block: var for var, block in self._blocks.inputs.items()}
        xs = []
        for var in self._xs:
            if var in self._counters:
                xs.append(_elements(self._counters[var], aval_of(var).dtype))
            elif var in sources:
                xs.append(_by_rows(values[sources[var]], self._by_rows.rows[sources[var]], self._length))
            else:
                xs.append(values[var])
        body = jaxpr_as_fun(closed(self._body))

        def one(carry, x):
            after = computed(body(*fixed, *carry, *x), [*carry, *x])
            return after[: len(carry)], after[len(carry) :]

        params = self._eqn.params
        final, stacks = lax.scan(one, initial, xs, self._length, params["reverse"], params["unroll"])
        results = dict(zip(self._kept, final, strict=True))
        results |= {i: self._last(i) for i, var in self._carried if var in self._counters}
        results |= dict(zip(self._stacked, stacks[: len(self._stacked)], strict=True))
        for i, stack in zip(self._changed, stacks[len(self._stacked) :], strict=True):
            var = self._carried[i][1]
            results[i] = _put(stack, values[var], self._by_rows.rows[var])
        return results

    def _last(self, i: int) -> Any:
        return jnp.asarray(self._final[i], aval_of(self._eqn.outvars[i]).dtype)


def _elements(numbers: range, dtype: Any) -> Any:
    counted = lax.iota(dtype, len(numbers))
    is_plain = (numbers.start, numbers.step) == (0, 1)
    return counted if is_plain else counted * numbers.step + jnp.asarray(numbers.start, dtype)


def _by_rows(array: Any, rows: Rows, length: int) -> Any:
    """An array with what each iteration has of it."""
    dim, shape = rows.dim, array.shape
    array = some_rows(array, rows.start, rows.start + length * rows.number, dim)
    return jnp.moveaxis(array.reshape(*shape[:dim], length, rows.number, *shape[dim + 1 :]), dim, 0)


def _put(stack: Any, array: Any, rows: Rows) -> Any:
    """An array with the rows that iterations have stacked."""
    dim, shape = rows.dim, array.shape
    number = stack.shape[0] * rows.number
    new = jnp.moveaxis(stack, 0, dim).reshape(*shape[:dim], number, *shape[dim + 1 :])
    return with_some_rows(array, new, rows.start, dim)
