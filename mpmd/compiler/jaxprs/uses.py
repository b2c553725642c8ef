"""How an operation can be shared by devices: the dimensions along which it can be computed in parts.

``axes.py`` has the dimensions along which the equations that a compiler writes for parts give the same
values. Here is what more a partitioner of arrays can do: look up rows of a table that is divided by rows, and
add up what the devices found; count along a divided dimension; divide a convolution.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.axes import axes_of
from mpmd.compiler.jaxprs.axis import shape_of


@dataclasses.dataclass(frozen=True)
class Use:
    """A dimension along which devices can share an operation.

    Attributes:
      ins: for operands that have it, by position, which of their dimensions it is.
      outs: the same for results.
      is_summed: whether each device then has a part of the sum that the results are.
    """

    ins: Mapping[int, int]
    outs: Mapping[int, int]
    is_summed: bool = False


def uses_of(eqn: JaxprEqn) -> tuple[Use, ...]:
    """The dimensions of an equation that have more than one element, each once."""
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None:
        return tuple(use for use in rule(eqn) if _size(eqn, use) > 1)
    return tuple(_in_parts(eqn))


def _size(eqn: JaxprEqn, use: Use) -> int:
    sizes = [shape_of(eqn.invars[i])[d] for i, d in use.ins.items()]
    sizes += [shape_of(eqn.outvars[i])[d] for i, d in use.outs.items()]
    return min(sizes, default=1)


def _in_parts(eqn: JaxprEqn) -> Iterator[Use]:
    return (Use(axis.ins, axis.outs, not axis.outs) for axis in axes_of(eqn))


def _gather(eqn: JaxprEqn) -> Iterator[Use]:
    """A table that is divided by rows: each device finds those of its own, zeros for others."""
    yield from _in_parts(eqn)
    for d in eqn.params["dimension_numbers"].collapsed_slice_dims:
        yield Use({0: d}, {}, is_summed=True)


def _scatter(eqn: JaxprEqn) -> Iterator[Use]:
    """A table that is divided by rows: each device changes those of its own."""
    yield from _in_parts(eqn)
    numbers = eqn.params["dimension_numbers"]
    written = (u for u in range(len(shape_of(eqn.invars[2]))) if u not in numbers.update_window_dims)
    for e, u in enumerate(written):
        if e not in numbers.scatter_indices_batching_dims and eqn.primitive.name == "scatter-add":
            yield Use({1: e, 2: u}, {}, is_summed=True)
    for d in numbers.inserted_window_dims:
        yield Use({0: d}, {0: d})


def _convolution(eqn: JaxprEqn) -> Iterator[Use]:
    numbers = eqn.params["dimension_numbers"]
    yield from _in_parts(eqn)
    if eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1:
        yield Use({0: numbers.lhs_spec[1], 1: numbers.rhs_spec[1]}, {}, is_summed=True)


def _iota(eqn: JaxprEqn) -> Iterator[Use]:
    for d in range(len(shape_of(eqn.outvars[0]))):
        yield Use({}, {0: d})


def _each(eqn: JaxprEqn) -> Iterator[Use]:
    """Each result is the operand in the same place."""
    for i, atom in enumerate(eqn.invars):
        for d in range(len(shape_of(atom))):
            yield Use({i: d}, {i: d})


def _top_k(eqn: JaxprEqn) -> Iterator[Use]:
    along = eqn.params.get("axis", -1) % len(shape_of(eqn.invars[0]))
    for d in range(len(shape_of(eqn.invars[0]))):
        if d != along:
            yield Use({0: d}, dict(zip(range(len(eqn.outvars)), itertools.repeat(d), strict=False)))


_RULES: dict[str, Callable[[JaxprEqn], Iterator[Use]]] = {
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "conv_general_dilated": _convolution,
    "iota": _iota,
    "optimization_barrier": _each,
    "top_k": _top_k,
}
