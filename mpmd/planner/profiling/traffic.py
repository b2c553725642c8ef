"""The bytes that a task reads from memory, writes and holds, under the usual fusions of XLA."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from mpmd.compiler.jaxprs.cost import is_fused
from mpmd.compiler.jaxprs.flat import Operation, Value
from mpmd.compiler.jaxprs.kernels import NO_KERNEL_VALUES, KernelValues, call_work
from mpmd.compiler.jaxprs.work import has_product
from mpmd.planner.fusions import memory_values


class Traffic(NamedTuple):
    """Bytes read and written by all operations, and by the operations that are no products (``beside``).

    ``temporaries`` are the most bytes at once of values that only the task itself reads, and ``kernels``
    the number of fusions and other kernels.
    """

    nbytes: float
    beside: float
    temporaries: float
    kernels: float


def traffic(
    operations: Sequence[Operation],
    kept: Collection[Value],
    nbytes: Callable[[Value], float],
    of_kernels: KernelValues[Value] = NO_KERNEL_VALUES,
) -> Traffic:
    """The bytes that operations read, write and hold, under the fusions of ``memory_values``.

    Args:
      kept: values that the task reads from other tasks or makes for them, which are in memory.
      nbytes: the bytes to count of a value.
      of_kernels: the values of kernels: values inside a kernel are never in memory.
    """
    equations = [
        (operation.eqn, [value for value in operation.reads if value is not None], operation.makes)
        for operation in operations
    ]
    written, windows = memory_values(equations, kept, of_kernels.operands)
    written, windows = written.difference(of_kernels.inside), windows.difference(of_kernels.inside)
    sources: dict[Value, frozenset[Value]] = dict.fromkeys(of_kernels.inside, frozenset())
    last: dict[Value, int] = {}
    total = beside = kernels = 0.0
    for position, operation in enumerate(operations):
        read = frozenset[Value]().union(
            *(sources.get(value, frozenset({value})) for value in operation.reads if value is not None)
        )
        last |= dict.fromkeys(read, position)
        results = [value for value in operation.makes if value in written]
        if (of_calls := call_work(operation.eqn)) is not None:
            total += operation.times * of_calls.nbytes
        elif results:
            moved = operation.times * sum(map(nbytes, {*results, *read}))
            moved *= 1.0 if operation.kernel is None else operation.kernel.bytes_factor
            total += moved
            kernels += operation.times
            beside += 0.0 if has_product(operation.eqn) else moved
        for value in operation.makes:
            sources[value] = frozenset({value}) if value in written or value in windows else read
    return Traffic(total, beside, _most_held(operations, written.difference(kept), last, nbytes), kernels)


def _most_held(
    operations: Sequence[Operation],
    held: Collection[Value],
    last: Mapping[Value, int],
    nbytes: Callable[[Value], float],
) -> float:
    """The most bytes of the ``held`` values at once, each from its computation until its last reader.

    Args:
      last: for each value, the position of the last operation that reads it; unread values have no entry.
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
