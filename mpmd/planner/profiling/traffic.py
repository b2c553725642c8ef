"""How many bytes a task reads and writes of memory, if XLA fuses what it usually does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mpmd.compiler.jaxprs.cost import has_reduction, is_fused, is_renamed, is_window
from mpmd.compiler.jaxprs.flat import Operation, Value
from mpmd.compiler.jaxprs.work import has_product


class Traffic(NamedTuple):
    """Bytes that are read and written: by all operations, and by those that are no products."""

    nbytes: float
    beside: float


def traffic(
    operations: Sequence[Operation], kept: Collection[Value], nbytes: Callable[[Value], float]
) -> Traffic:
    """The bytes that operations read and write.

    A chain of elementwise operations is one pass over memory (a *fusion*), into which reductions of its
    results go, too. Products, sorts, scatters and the like read operands from memory and write their results
    there.

    Args:
      kept: what the task reads from elsewhere and makes for others, which is in memory.
      nbytes: the bytes of a value that count.
    """
    written = set(kept)
    windows: set[Value] = set()
    for operation in operations:
        eqn = operation.eqn
        if is_window(eqn):
            windows.update(operation.makes)
        elif not is_fused(eqn):
            written.update(value for value in operation.reads if value is not None)
            written.update(operation.makes)
        elif has_reduction(eqn):
            written.update(operation.makes)
    in_memory = set(written)
    for operation in operations:
        if is_renamed(operation.eqn) and not in_memory.isdisjoint(operation.reads):
            written -= {*operation.makes} - {*kept}
            in_memory.update(operation.makes)
    sources: dict[Value, frozenset[Value]] = {}
    total = beside = 0.0
    for operation in operations:
        read = frozenset[Value]().union(
            *(sources.get(value, frozenset({value})) for value in operation.reads if value is not None)
        )
        made = [value for value in operation.makes if value in written]
        if made:
            moved = operation.times * sum(map(nbytes, {*made, *read}))
            total += moved
            beside += 0.0 if has_product(operation.eqn) else moved
        for value in operation.makes:
            sources[value] = frozenset({value}) if value in written or value in windows else read
    return Traffic(total, beside)
