"""How many bytes a task reads and writes of memory, and holds, if XLA fuses what it usually does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from mpmd.compiler.jaxprs.cost import has_reduction, is_fused, is_renamed, is_window
from mpmd.compiler.jaxprs.flat import Operation, Value
from mpmd.compiler.jaxprs.work import has_product


class Traffic(NamedTuple):
    """Bytes that are read and written: by all operations, and by those that are no products.

    ``temporaries`` are the most bytes, at once, of what the task makes and nobody else reads.
    """

    nbytes: float
    beside: float
    temporaries: float


def traffic(
    operations: Sequence[Operation], kept: Collection[Value], nbytes: Callable[[Value], float]
) -> Traffic:
    """The bytes that operations read and write, and hold.

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
    last: dict[Value, int] = {}
    total = beside = 0.0
    for position, operation in enumerate(operations):
        read = frozenset[Value]().union(
            *(sources.get(value, frozenset({value})) for value in operation.reads if value is not None)
        )
        last |= dict.fromkeys(read, position)
        made = [value for value in operation.makes if value in written]
        if made:
            moved = operation.times * sum(map(nbytes, {*made, *read}))
            total += moved
            beside += 0.0 if has_product(operation.eqn) else moved
        for value in operation.makes:
            sources[value] = frozenset({value}) if value in written or value in windows else read
    return Traffic(total, beside, _most_held(operations, written.difference(kept), last, nbytes))


def _most_held(
    operations: Sequence[Operation],
    held: Collection[Value],
    last: Mapping[Value, int],
    nbytes: Callable[[Value], float],
) -> float:
    """The most bytes of some values at once, each from where it is made until it is read last.

    Args:
      last: the positions of the operations that read values last; others are read by none.
    """
    changes = [0.0] * (len(operations) + 1)
    for position, operation in enumerate(operations):
        for value in operation.makes:
            if value in held and value in last:
                # A fusion can write where it reads.
                until = last[value] + (not is_fused(operations[last[value]].eqn))
                changes[position] += nbytes(value)
                changes[max(until, position + 1)] -= nbytes(value)
    return max(accumulate(changes))
