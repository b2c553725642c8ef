"""The work of tasks: their operations, and the bytes that they read from memory, write and hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mpmd.compiler.jaxprs.flat import Value
from mpmd.compiler.jaxprs.kernels import KernelValues, call_work
from mpmd.compiler.jaxprs.work import has_product, product_kind
from mpmd.planner.curves import ProductWork, added
from mpmd.planner.fusions import Fusions
from mpmd.planner.layer_profile import TaskWork
from mpmd.planner.profiling.classes import ClassedOperation


def task_work(
    members: Sequence[ClassedOperation],
    kept: Collection[Value],
    nbytes: Callable[[Value], float],
    of_kernels: KernelValues[Value],
) -> TaskWork:
    """The work of a task's operations, under the usual fusions of XLA.

    Args:
      kept: values that the task reads from other tasks or makes for them, which are in memory.
      nbytes: the bytes to count of a value.
      of_kernels: the values of kernels: values inside a kernel are never in memory.
    """
    equations = [
        (operation.eqn, [value for value in operation.reads if value is not None], operation.makes)
        for operation, _, _ in members
    ]
    fusions = Fusions.of(equations, kept, of_kernels)
    total = beside = kernels = 0.0
    products: dict[str, ProductWork] = {}
    for (operation, work, _), read in zip(members, fusions.reads, strict=True):
        results = [value for value in operation.makes if value in fusions.written]
        if (of_calls := call_work(operation.eqn)) is not None:
            total += operation.times * of_calls.nbytes
        elif results:
            moved = operation.times * sum(map(nbytes, {*results, *read}))
            moved *= 1.0 if operation.kernel is None else operation.kernel.bytes_factor
            total += moved
            kernels += operation.times
            beside += 0.0 if has_product(operation.eqn) else moved
        if work and (name := product_kind(operation.eqn, in_kernel=operation.kernel is not None)):
            products = added(products, {name: ProductWork(work, float(operation.times))})
    return TaskWork(
        operations=float(sum(work for _, work, _ in members)),
        nbytes=total,
        nbytes_beside=beside,
        temporaries=fusions.most_held(kept, nbytes),
        kernels=kernels,
        products=products,
    )
