"""Fusions: the chains of equations that XLA makes one pass over memory, and the values between them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple, TypeVar

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.cost import has_reduction, is_fused, is_renamed, is_window
from mpmd.compiler.jaxprs.equations import size

_OF_DIMENSIONS = frozenset("broadcast_in_dim reduce_max reduce_min reduce_sum".split())

Value = TypeVar("Value", bound=Hashable)


class MemoryValues(NamedTuple):
    """Values that equations read from memory.

    Attributes:
      written: values that are written to memory, or are there from the start.
      windows: parts of values in memory, which their readers read there.
    """

    written: set
    windows: set


def memory_values(
    equations: Sequence[tuple[JaxprEqn, Collection[Value], Collection[Value]]],
    kept: Collection[Value],
    of_kernels: Collection[Value] = (),
) -> MemoryValues:
    """Returns the values of equations that are in memory, under the usual fusions of XLA.

    A chain of elementwise equations is one fusion, into which reductions of its results go, too. Products,
    sorts, scatters and the like read operands from memory and write their results there. Another name of a
    value in memory, such as a reshaped one, is not written again.

    Args:
      equations: each with the values that it reads and makes.
      kept: values that are in memory in any case, since further equations compute or read them.
      of_kernels: the operands and results of kernels, which no fusion goes across.
    """
    written, windows = set(kept), set[Value]()
    for eqn, reads, makes in equations:
        if is_window(eqn):
            windows.update(makes)
        elif not is_fused(eqn):
            written.update(reads)
            written.update(makes)
        elif has_reduction(eqn):
            written.update(makes)
        else:
            written.update(value for value in makes if value in of_kernels)
    named = set(written)
    for eqn, reads, makes in equations:
        if _is_renamed(eqn) and not named.isdisjoint(reads):
            written -= {*makes} - {*kept}
            named.update(makes)
    return MemoryValues(written, windows)


def _is_renamed(eqn: JaxprEqn) -> bool:
    """Whether a result is its operand in memory, also with dimensions of one element more or less."""
    if is_renamed(eqn):
        return True
    return eqn.primitive.name in _OF_DIMENSIONS and size(eqn.invars[0]) == size(eqn.outvars[0])
