"""The bytes that a task reads from memory, writes and holds, under the usual fusions of XLA."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mpmd.compiler.jaxprs.flat import Operation, Value
from mpmd.compiler.jaxprs.kernels import NO_KERNEL_VALUES, KernelValues, call_work
from mpmd.compiler.jaxprs.work import has_product
from mpmd.planner.fusions import Fusions


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
    """The bytes that operations read, write and hold.

    Args:
      kept: values that the task reads from other tasks or makes for them, which are in memory.
      nbytes: the bytes to count of a value.
      of_kernels: the values of kernels: values inside a kernel are never in memory.
    """
    equations = [
        (operation.eqn, [value for value in operation.reads if value is not None], operation.makes)
        for operation in operations
    ]
    fusions = Fusions.of(equations, kept, of_kernels)
    total = beside = kernels = 0.0
    for operation, read in zip(operations, fusions.reads, strict=True):
        results = [value for value in operation.makes if value in fusions.written]
        if (of_calls := call_work(operation.eqn)) is not None:
            total += operation.times * of_calls.nbytes
        elif results:
            moved = operation.times * sum(map(nbytes, {*results, *read}))
            moved *= 1.0 if operation.kernel is None else operation.kernel.bytes_factor
            total += moved
            kernels += operation.times
            beside += 0.0 if has_product(operation.eqn) else moved
    return Traffic(total, beside, fusions.most_held(kept, nbytes), kernels)
