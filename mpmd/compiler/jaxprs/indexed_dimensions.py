"""The dimensions that operands and results of ``gather`` and ``scatter`` have in common.

Exact are the dimensions in which each window is as large as the array, so that no index selects in them, and
the batching dimensions, along which each element has indices of its own. Shared are also the rows of a table:
each device looks up the rows that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.common_dimension import CommonDimension
from mpmd.compiler.jaxprs.equations import shape_of


def gather_dimensions(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """With a table divided by rows, each device finds its own rows, and zeros for rows of other devices."""
    numbers = eqn.params["dimension_numbers"]
    shape, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    batch = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    looked_up = (j for j in range(len(target)) if j not in numbers.offset_dims)
    for e, j in enumerate(looked_up):
        yield CommonDimension({0: batch[e], 1: e} if e in batch else {1: e}, {0: j})
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    for d, j in _windows(len(shape), gone, numbers.offset_dims):
        if target[j] == shape[d]:
            yield CommonDimension({0: d}, {0: j})
    for d in numbers.collapsed_slice_dims:
        yield CommonDimension({0: d}, {}, "shared")


def gather_params(eqn: JaxprEqn, dimension: CommonDimension, size: int) -> Mapping[str, Any]:
    if set(dimension.ins) != {0}:
        return {}
    sizes = list(eqn.params["slice_sizes"])
    sizes[dimension.ins[0]] = size
    return {"slice_sizes": tuple(sizes)}


def scatter_dimensions(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """With a table divided by rows, each device changes its own rows."""
    numbers = eqn.params["dimension_numbers"]
    shape, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    batch = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    written = [u for u in range(len(updates)) if u not in numbers.update_window_dims]
    for e, u in enumerate(written):
        if e in batch:
            yield CommonDimension({0: batch[e], 1: e, 2: u}, {0: batch[e]})
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    for d, u in _windows(len(shape), gone, numbers.update_window_dims):
        is_whole = updates[u] == shape[d]
        yield CommonDimension({0: d, 2: u}, {0: d}) if is_whole else CommonDimension({0: d}, {0: d}, "guess")
    if eqn.primitive.name == "scatter-add":
        for e, u in enumerate(written):
            if e not in batch:
                yield CommonDimension({1: e, 2: u}, {}, "shared")
    for d in numbers.inserted_window_dims:
        yield CommonDimension({0: d}, {0: d}, "shared")


def _windows(rank: int, gone: Iterable[int], places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The dimensions of a table that windows have, and which of the windows' array each is."""
    gone = set(gone)
    return zip((d for d in range(rank) if d not in gone), places, strict=True)
