"""Costs of sharing a task over devices that divide some classes of dimensions.

Devices along an axis divide, of each value, the first dimension whose class is divided; a value without one
is on every device. Devices share an operation along one of its divided dimensions. Operands that are
divided along another dimension are gathered. If the operation sums over the shared dimension, each device
has a part of the sum.

Under sequence parallelism, values without a divided class are divided along the dimension of the tokens
(``between``). An operation with a divided dimension and a dimension of tokens is shared along the former:
it gathers the values that it reads, and scatters its sums. A value that several operations of a task gather
is gathered once.

Source of the rules: Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs",
2021, arXiv:2105.04663, section 4. Where several ways to share an operation exist, a partitioner chooses by
rules; this file chooses the way that moves the fewest bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Sequence, Set

from mpmd.compiler.jaxprs.common_dimension import CommonDimension
from mpmd.compiler.jaxprs.flat import FlatEquations, Value
from mpmd.compiler.shard.sums import SUMS
from mpmd.planner.all_reduces import NO_ALL_REDUCES, AllReduces
from mpmd.planner.profiling.classes import Class, ClassedOperation, DimensionClasses


@dataclasses.dataclass(frozen=True)
class Shared:
    """A task that devices share.

    Attributes:
      operations: the number of multiplications and additions that devices divide.
      all_reduces: of each microbatch, before any are merged.
      summed: the values that are all-reduced, so that each device has the whole sum.
      scattered: the values whose sums are scattered, so that each device has a part, as between regions.
      partial: values that only add to accumulators and of whose sum each device has a part. The accumulators
        can hold the parts until the end of the step.
    """

    operations: float = 0.0
    all_reduces: AllReduces = NO_ALL_REDUCES
    partial: frozenset[Value] = frozenset()
    summed: frozenset[Value] = frozenset()
    scattered: frozenset[Value] = frozenset()

    def __add__(self, other: Shared) -> Shared:
        return Shared(
            self.operations + other.operations,
            self.all_reduces.plus(other.all_reduces),
            self.partial | other.partial,
            self.summed | other.summed,
            self.scattered | other.scattered,
        )


class Sharing:
    """Values and operations of a step under a choice of classes that are divided.

    Args:
      between: the classes that are divided in values without any of ``divided``, if these have further
        dimensions beside them and the ``rows``.
    """

    def __init__(
        self,
        flat: FlatEquations,
        classes: DimensionClasses,
        divided: Set[Class],
        between: Set[Class] = frozenset(),
        rows: Set[Class] = frozenset(),
    ):
        self._flat = flat
        self._classes = classes
        self._divided = divided
        self._between, self._rows = between, rows
        self._dims: dict[Value, int | None] = {}

    def dim(self, value: Value) -> int | None:
        """The divided dimension of a value; ``None`` if none is."""
        if value not in self._dims:
            shape = self._flat.avals[value].shape
            classes = self._classes.of_value(value)
            dims = (d for d, one in enumerate(classes) if one in self._divided and shape[d] > 1)
            self._dims[value] = next(dims, None)
            if self._dims[value] is None and self._between:
                self._dims[value] = self._dim_between(shape, classes)
        return self._dims[value]

    def _dim_between(self, shape: Sequence[int], classes: Sequence[Class]) -> int | None:
        long = [d for d, size in enumerate(shape) if size > 1]
        dims = [d for d in long if classes[d] in self._between]
        others = [d for d in long if classes[d] not in self._between and classes[d] not in self._rows]
        return dims[0] if dims and others else None

    def _is_between(self, value: Value) -> bool:
        """Whether sequence parallelism divides a value."""
        dim = self.dim(value)
        return dim is not None and self._classes.of(value, dim) not in self._divided

    def largest(self, values: Iterable[Value]) -> int:
        dims = ((value, self.dim(value)) for value in values)
        return math.gcd(*(self._flat.avals[value].shape[dim] for value, dim in dims if dim is not None))

    def task(self, members: Iterable[ClassedOperation], accumulated: Container[Value]) -> Shared:
        """The shared part of a task.

        Args:
          accumulated: values that only add to accumulators.
        """
        total = Shared()
        whole = set[Value]()
        for member in members:
            values = member.operation.values
            if any(self.dim(value) is not None for value in values):
                total += self._operation(member, accumulated, whole)
            if self._between and any(
                self.dim(value) is not None and not self._is_between(value) for value in values
            ):
                whole.update(
                    value for value in member.operation.reads if value is not None and self._is_between(value)
                )
        return total

    def _operation(
        self, member: ClassedOperation, accumulated: Container[Value], whole: Container[Value]
    ) -> Shared:
        """``whole`` has the values that have been gathered before."""
        operation = member.operation
        uses = [use for of_class, use in member.uses if of_class in self._divided]
        uses = uses or [use for of_class, use in member.uses if of_class in self._between]
        gathered = [
            self._moved(value) for value in operation.reads if value is not None and value not in whole
        ]
        alone = Shared(all_reduces=AllReduces(sum(gathered), float(sum(nbytes > 0 for nbytes in gathered))))
        ways = [self._way(member, use, accumulated, whole) for use in uses] or [alone]
        best = min(ways, key=lambda way: (way.all_reduces.nbytes, len(way.partial)))
        return dataclasses.replace(best, all_reduces=best.all_reduces.times(operation.times))

    def _way(
        self,
        member: ClassedOperation,
        use: CommonDimension,
        accumulated: Container[Value],
        whole: Container[Value],
    ) -> Shared:
        operation = member.operation
        gathered_values = [
            value
            for i, value in enumerate(operation.reads)
            if value is not None and self.dim(value) not in (None, use.ins.get(i)) and value not in whole
        ]
        gathered = [*map(self._moved, gathered_values)]
        moved, number = sum(gathered), sum(map(self._exchanges, gathered_values))
        partial: set[Value] = set()
        summed: set[Value] = set()
        scattered: set[Value] = set()
        for i, value in enumerate(operation.makes):
            if use.is_reduced and self.dim(value) is not None:
                moved += self._moved(value)  # summed and scattered
                number += self._exchanges(value)
                if self._is_between(value):
                    scattered.add(value)
            elif use.is_reduced and value in accumulated and operation.eqn.primitive.name in SUMS:
                partial.add(value)
            elif use.is_reduced:
                moved += self._nbytes(value)
                number += 1
                summed.add(value)
            elif self.dim(value) not in (None, use.outs.get(i)):
                moved += self._moved(value)
                number += 1
        all_reduces = AllReduces(moved, float(number))
        return Shared(member.work, all_reduces, frozenset(partial), frozenset(summed), frozenset(scattered))

    def _exchanges(self, value: Value) -> float:
        """The all-reduces that a gathered or scattered value counts: half of one between regions."""
        return 0.5 if self._is_between(value) else 1.0

    def _moved(self, value: Value) -> float:
        return 0.0 if self.dim(value) is None else self._nbytes(value) / 2

    def _nbytes(self, value: Value) -> float:
        aval = self._flat.avals[value]
        return float(math.prod(aval.shape) * aval.dtype.itemsize)
