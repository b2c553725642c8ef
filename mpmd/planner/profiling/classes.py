"""Dimension classes: the dimensions of a step's values that are one and the same.

Two dimensions are in one class if an operation uses them as one dimension, as a matrix product does with
the dimension of both operands that it sums over. If one dimension of a class is divided over devices, each
device has the matching part of every dimension of the class. Equality has no direction: classes are found
by union, in one pass over the operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.common_dimension import CommonDimension
from mpmd.compiler.jaxprs.disjoint_sets import DisjointSets
from mpmd.compiler.jaxprs.flat import FlatEquations, Operation, Passed, Value
from mpmd.compiler.jaxprs.kernels import call_work
from mpmd.compiler.jaxprs.rules import shared_dimensions
from mpmd.compiler.jaxprs.work import total_operations
from mpmd.ir.plan import TaskType

Class = int


class ClassUse(NamedTuple):
    of_class: Class
    use: CommonDimension


class ClassedOperation(NamedTuple):
    """An operation, its multiplications and additions in all runs, and the ways to share it."""

    operation: Operation
    work: float
    uses: tuple[ClassUse, ...]


class DimensionClasses:
    def __init__(self, flat: FlatEquations):
        self._first = [0]
        for aval in flat.avals:
            self._first.append(self._first[-1] + len(aval.shape))
        self._same: DisjointSets[int] = DisjointSets()

    def of(self, value: Value, dim: int) -> Class:
        return self._same.find(self._first[value] + dim)

    def of_value(self, value: Value) -> tuple[Class, ...]:
        return tuple(map(self._same.find, range(self._first[value], self._first[value + 1])))

    def join(self, nodes: Iterable[tuple[Value, int]]) -> None:
        self._same.join(self._first[value] + dim for value, dim in nodes)


def classed(
    flat: FlatEquations,
    tasks: Mapping[TaskType, Sequence[Operation]],
    before: Sequence[Operation],
    same: Iterable[Sequence[tuple[Value, int]]],
) -> tuple[DimensionClasses, dict[TaskType, list[ClassedOperation]]]:
    """Returns the classes of a step's values, and the operations of each task with the classes of their
    dimensions.

    Args:
      before: the operations before the loop, such as casts of weights.
      same: further sequences of dimensions, each to be joined in one class.
    """
    classes = DimensionClasses(flat)
    uses = {work: [_shared(operation.eqn) for operation in operations] for work, operations in tasks.items()}
    for work, operations in tasks.items():
        for operation, ways in zip(operations, uses[work], strict=True):
            for use in ways:
                classes.join(_nodes(operation, use))
    for operation in before:
        for use in _shared(operation.eqn):
            classes.join(_nodes(operation, use))
    for nodes in itertools.chain(same, *(_of_passed(flat, passed) for passed in flat.passed)):
        classes.join(nodes)

    def with_classes(operation: Operation, ways: Sequence[CommonDimension]) -> ClassedOperation:
        class_uses = [ClassUse(classes.of(*node), use) for use in ways for node in _first(operation, use)]
        of_calls = call_work(operation.eqn)
        if of_calls is not None:
            work = operation.times * of_calls.operations
            return ClassedOperation(operation, work, _together(class_uses))
        work = float(operation.times * total_operations([operation.eqn]))
        if operation.kernel is not None:
            work *= operation.kernel.factor
        return ClassedOperation(operation, work, tuple(class_uses))

    return classes, {work: [*map(with_classes, tasks[work], uses[work])] for work in tasks}


def _shared(eqn: JaxprEqn) -> list[CommonDimension]:
    """Returns the dimensions along which devices can share an equation; for a kernel, without the
    dimensions that its parameter ``whole`` lists."""
    whole = [{*dims} for dims in eqn.params["whole"]] if call_work(eqn) is not None else []
    return [
        one
        for one in shared_dimensions(eqn)
        if not whole or all(dim not in whole[i] for i, dim in one.ins.items())
    ]


def _together(uses: Iterable[ClassUse]) -> tuple[ClassUse, ...]:
    """The operands of a kernel share each class once."""
    by_class: dict[Class, CommonDimension] = {}
    for one, use in uses:
        before = by_class.get(one, CommonDimension({}, {}))
        by_class[one] = CommonDimension({**use.ins, **before.ins}, {**use.outs, **before.outs}, use.promise)
    return tuple(ClassUse(one, use) for one, use in by_class.items())


def _nodes(operation: Operation, use: CommonDimension) -> Iterator[tuple[Value, int]]:
    for i, dim in use.ins.items():
        value = operation.reads[i]
        if value is not None:
            yield value, dim
    for i, dim in use.outs.items():
        yield operation.makes[i], dim


def _first(operation: Operation, use: CommonDimension) -> Iterator[tuple[Value, int]]:
    yield from itertools.islice(_nodes(operation, use), 1)


def _of_passed(flat: FlatEquations, passed: Passed) -> Iterator[list[tuple[Value, int]]]:
    for dim in range(len(flat.avals[passed.inner].shape)):
        yield [(passed.outer, dim + passed.axis), (passed.inner, dim)]
