"""Which dimensions a gather or a scatter has in its operands and results alike: those it does not index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.axis import Axis, shape_of

SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub")


def gather_axes(eqn: JaxprEqn) -> Iterator[Axis]:
    """The batch dimensions, those of the indices alone, and those of the operand that are taken whole."""
    numbers: Any = eqn.params["dimension_numbers"]
    operand, rank = shape_of(eqn.invars[0]), len(shape_of(eqn.outvars[0]))
    batch = [j for j in range(rank) if j not in numbers.offset_dims]
    together = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for i, j in enumerate(batch):  # the last dimension of the indices is that of one index
        yield Axis({1: i} | ({0: together[i]} if i in together else {}), {0: j})
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(operand)) if d not in gone]
    for d, j in zip(window, numbers.offset_dims, strict=True):
        if d not in numbers.start_index_map and eqn.params["slice_sizes"][d] == operand[d]:
            yield Axis({0: d}, {0: j})


def gather_part(eqn: JaxprEqn, axis: Axis, size: int) -> dict[str, Any]:
    """The parameters of a part of a ``gather``."""
    if 1 in axis.ins:  # one index takes as much as before
        return {}
    sizes = list(eqn.params["slice_sizes"])
    sizes[axis.ins[0]] = size
    return {"slice_sizes": tuple(sizes)}


def scatter_axes(eqn: JaxprEqn) -> Iterator[Axis]:
    """The batch dimensions, and those of the operand that updates have whole."""
    numbers: Any = eqn.params["dimension_numbers"]
    operand, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    batch = [j for j in range(len(updates)) if j not in numbers.update_window_dims]
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for d, i in pairs:
        yield Axis({0: d, 1: i, 2: batch[i]}, {0: d})
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(operand)) if d not in gone]
    for d, j in zip(window, numbers.update_window_dims, strict=True):
        if d not in numbers.scatter_dims_to_operand_dims and updates[j] == operand[d]:
            yield Axis({0: d, 2: j}, {0: d})
