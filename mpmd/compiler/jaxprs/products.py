"""The dimensions that operands and results of products of matrices have in common."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from jax import lax
from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.common_dimension import CommonDimension
from mpmd.compiler.jaxprs.equations import shape_of


def product_dimensions(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    yield from _product(eqn, eqn.params["dimension_numbers"])


def _product(
    eqn: JaxprEqn, numbers: lax.DotDimensionNumbers, groups: Collection[int] = (), first: int = 0
) -> Iterator[CommonDimension]:
    """The dimensions of a product but the ``groups`` of its second operand; ``first`` is in the result."""
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    result = itertools.count(first)
    for d, e in zip(left_batch, right_batch, strict=True):
        yield CommonDimension({0: d, 1: e}, {0: next(result)})
    for operand, used in ((0, {*left_sum, *left_batch}), (1, {*right_sum, *right_batch, *groups})):
        for d in range(len(shape_of(eqn.invars[operand]))):
            if d not in used:
                yield CommonDimension({operand: d}, {0: next(result)})
    for d, e in zip(left_sum, right_sum, strict=True):
        yield CommonDimension({0: d, 1: e}, {}, combine=lax.add)


def ragged_product_dimensions(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """All dimensions. Devices can also share the groups, and add up the rows that each has computed."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    is_by_group = ragged in contracted
    # The sizes of groups may have the first operand's batch, and what is before its ragged dimension.
    others = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in (*batch, *contracted)]
    alike = next(dims for dims in (batch, contracted, others) if ragged in dims)
    before = [*(() if alike is batch else batch), *alike[: alike.index(ragged)]]
    before = before[: len(shape_of(eqn.invars[2])) - 1]
    for one in _product(eqn, numbers.dot_dimension_numbers, groups, int(is_by_group)):
        sizes = {2: before.index(d)} if (d := one.ins.get(0)) in before else {}
        yield CommonDimension({**one.ins, **sizes}, one.outs, "shared")
    if is_by_group:
        yield CommonDimension({}, {0: 0}, "shared")
    for d in groups:
        yield CommonDimension({1: d}, {}, "shared")
