"""Reads which rows of an array an equation in the body of a scan takes or changes in each iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import shape_of


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of an array that the iterations of a scan have, each its own.

    Attributes:
      dim: the dimension of which they are elements.
      number: how many an iteration has.
      start: the first one of the first.
    """

    dim: int
    number: int
    start: int

    def block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the rows of one iteration."""
        return (*shape[: self.dim], self.number, *shape[self.dim + 1 :])


@dataclasses.dataclass(frozen=True)
class Access:
    """An equation's access to the rows of one iteration.

    Attributes:
      eqn: it has the array as its first operand.
      first, size: which of the iteration's rows it takes or changes.
      update: the position of the operand with the new values; ``None`` of an equation that reads.
    """

    eqn: JaxprEqn
    rows: Rows
    first: int
    size: int
    update: int | None

    @property
    def is_whole(self) -> bool:
        """Whether it takes or changes all of these rows, also in the array's other dimensions."""
        if self.eqn.primitive.name not in ("dynamic_slice", "dynamic_update_slice"):
            return True
        other = self.eqn.outvars[0] if self.update is None else self.eqn.invars[self.update]
        shape, dim = shape_of(self.eqn.invars[0]), self.rows.dim
        return all(d == dim or size == shape[d] for d, size in enumerate(shape_of(other)))


def access_of(eqn: JaxprEqn, rows: Mapping[Var, np.ndarray], length: int) -> Access | None:
    """The rows of its first operand that an equation takes or changes in each iteration.

    The rows have to ascend with what is scanned over, by as many as an iteration has at least.

    Args:
      rows: the integers in the body of the scan, for each element of what is scanned over.
      length: the number of iterations.
    """
    selection = _selected(eqn, rows, length)
    if selection is None:
        return None
    dim, starts, size, update = selection
    starts = starts.astype(np.int64)
    step, total = int(starts[1]) - int(starts[0]), shape_of(eqn.invars[0])[dim]
    if step < 1 or starts[0] < 0 or not np.array_equal(starts, starts[0] + step * np.arange(length)):
        return None
    first = int(starts[0]) % step
    start = int(starts[0]) - first
    if first + size > step or start + length * step > total:
        return None
    return Access(eqn, Rows(dim, step, start), first, size, update)


def takes_counted_rows(eqn: JaxprEqn, rows: Mapping[Var, np.ndarray], length: int) -> bool:
    """Whether an equation reads other rows of its first operand in each iteration, in whatever order."""
    selection = _selected(eqn, rows, length)
    return selection is not None and selection[3] is None


Selected = tuple[int, np.ndarray, int, int | None]
"""The dimension, the first row in each iteration, how many rows, and the position of the update."""


def _selected(eqn: JaxprEqn, rows: Mapping[Var, np.ndarray], length: int) -> Selected | None:
    match eqn.primitive.name:
        case "dynamic_slice":
            return _window(eqn, 1, eqn.params["slice_sizes"], None, rows)
        case "dynamic_update_slice":
            return _window(eqn, 2, shape_of(eqn.invars[1]), 1, rows)
        case "gather":
            numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
            gone, named = numbers.collapsed_slice_dims, numbers.start_index_map
            return _one_row(eqn, numbers, gone, named, sizes, None, rows, length)
        case "scatter" | "scatter-add" | "scatter-mul" | "scatter-min" | "scatter-max":
            numbers = eqn.params["dimension_numbers"]
            gone, named = numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
            updates = shape_of(eqn.invars[2])
            window = iter(updates[d] for d in numbers.update_window_dims)
            single = {*gone, *numbers.operand_batching_dims}
            sizes = tuple(1 if d in single else next(window) for d in range(len(shape_of(eqn.invars[0]))))
            return _one_row(eqn, numbers, gone, named, sizes, 2, rows, length)
    return None


def _window(
    eqn: JaxprEqn, first: int, sizes: tuple[int, ...], update: int | None, rows: Mapping[Var, np.ndarray]
) -> Selected | None:
    """Of a slice at indices, of which those along one dimension alone change from iteration to iteration."""
    indices = eqn.invars[first : first + len(sizes)]
    counted = [d for d, atom in enumerate(indices) if isinstance(atom, Var) and _changes(rows.get(atom))]
    if len(counted) != 1 or len(eqn.invars) != first + len(sizes):
        return None
    (dim,) = counted
    index = indices[dim]
    assert isinstance(index, Var)
    return dim, rows[index], sizes[dim], update


def _one_row(
    eqn: JaxprEqn,
    numbers: Any,
    gone: tuple[int, ...],
    named: tuple[int, ...],
    sizes: tuple[int, ...],
    update: int | None,
    rows: Mapping[Var, np.ndarray],
    length: int,
) -> Selected | None:
    """Of a look-up, or an update, of one row, whole in all other dimensions."""
    index, shape = eqn.invars[1], shape_of(eqn.invars[0])
    values = rows.get(index) if isinstance(index, Var) else None
    if values is None or not _changes(values) or values.size != length:
        return None
    if tuple(gone) != tuple(named) or len(gone) != 1 or numbers.operand_batching_dims:
        return None
    (dim,) = gone
    if any(size != (1 if d == dim else shape[d]) for d, size in enumerate(sizes)):
        return None
    return int(dim), values.reshape(length), 1, update


def _changes(values: np.ndarray | None) -> bool:
    return values is not None and bool((values != values[:1]).any())
