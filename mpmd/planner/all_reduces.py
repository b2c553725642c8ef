"""The all-reduces of tasks; XLA joins all-reduces of which only the sum of the results is read.

The pass is ``AllReduceReassociate`` of XLA, which runs for accelerators.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import JaxprEqn

Value = TypeVar("Value", bound=Hashable)

_SUMS = frozenset("add add_any".split())
_PASSING = frozenset("convert_element_type copy expand_dims reshape squeeze transpose".split())


class AllReduces(NamedTuple):
    """The all-reduces of a task over an axis: numbers, or arrays by layer.

    Attributes:
      nbytes: their bytes on a device. A gathered value, or a sum that is scattered, counts half of its whole
        size, as it takes half of the time.
      number: how many there are, before any are merged. One between tensor-parallel regions that gathers or
        scatters counts half, as it takes half of the messages.
      merged_nbytes: the bytes among them that need no all-reduce of their own if sums are all-reduced once.
      merged_number: the number of the all-reduces that this saves.
      moved: the bytes among ``nbytes`` of values that are gathered, or summed and scattered; 0 for layers.
    """

    nbytes: Any = 0.0
    number: Any = 0.0
    merged_nbytes: Any = 0.0
    merged_number: Any = 0.0
    moved: Any = 0.0

    def plus(self, others: AllReduces) -> AllReduces:
        return AllReduces(*map(operator.add, self, others))

    def times(self, count: int) -> AllReduces:
        return AllReduces(*(count * amount for amount in self))

    def merged(self, merges: bool) -> tuple[Any, Any]:
        return self.nbytes - merges * self.merged_nbytes, self.number - merges * self.merged_number


NO_ALL_REDUCES = AllReduces()


def merged_sums(
    operations: Sequence[tuple[JaxprEqn, Sequence[Value | None], Sequence[Value], int]],
    summed: Mapping[Value, AllReduces],
    kept: Collection[Value],
) -> AllReduces:
    """The all-reduces that are saved by all-reducing sums of all-reduced values once.

    Args:
      operations: the operations of a task, in order: each equation with the values that it reads and makes,
        ``None`` for a literal, and how often it is computed.
      summed: the values that are all-reduced.
      kept: values that further tasks read, too.
    """
    reads = collections.Counter(value for _, read, _, _ in operations for value in read if value is not None)
    unmerged = {
        value: of_value for value, of_value in summed.items() if reads[value] == 1 and value not in kept
    }
    saved = number = 0.0
    for eqn, read, makes, times in operations:
        values = [value for value in read if value is not None]
        if not values or len(makes) != 1 or not unmerged.keys() >= {*values}:
            continue
        (made,) = makes
        of_values = [unmerged.pop(value) for value in values]
        largest = max(of_values)
        if eqn.primitive.name in _SUMS and len(values) == len(read):
            saved += times * (sum(of_value.nbytes for of_value in of_values) - largest.nbytes)
            number += times * (len(values) - 1) * largest.number
        elif eqn.primitive.name not in _PASSING:
            continue
        if reads[made] == 1 and made not in kept:
            unmerged[made] = largest
    return AllReduces(merged_nbytes=saved, merged_number=number)
