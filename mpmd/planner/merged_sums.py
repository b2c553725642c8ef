"""All-reduces that XLA makes one, because nothing but the sum of their results is read.

The pass is ``AllReduceReassociate`` of XLA, which runs for accelerators.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple, TypeVar

from jax.extend.core import JaxprEqn

Value = TypeVar("Value", bound=Hashable)

_SUMS = frozenset("add add_any".split())
_PASSING = frozenset("convert_element_type copy expand_dims reshape squeeze transpose".split())


class Merged(NamedTuple):
    """The bytes and the number of the all-reduces that merging saves."""

    nbytes: float = 0.0
    number: float = 0.0


def merged_sums(
    operations: Sequence[tuple[JaxprEqn, Sequence[Value | None], Sequence[Value], int]],
    summed: Collection[Value],
    kept: Collection[Value],
    nbytes: Callable[[Value], float],
) -> Merged:
    """The savings by all-reducing sums of all-reduced values once.

    Args:
      operations: the operations of a task, in order: each equation with the values that it reads and makes,
        ``None`` for a literal, and how often it is computed.
      summed: the values that are all-reduced.
      kept: values that further tasks read, too.
      nbytes: the bytes of a value.
    """
    reads = collections.Counter(value for _, read, _, _ in operations for value in read if value is not None)
    open_bytes = {value: nbytes(value) for value in summed if reads[value] == 1 and value not in kept}
    saved = number = 0.0
    for eqn, read, makes, times in operations:
        values = [value for value in read if value is not None]
        if not values or len(makes) != 1 or not all(value in open_bytes for value in values):
            continue
        (made,) = makes
        of_values = [open_bytes.pop(value) for value in values]
        if eqn.primitive.name in _SUMS and len(values) == len(read):
            saved += times * (sum(of_values) - max(of_values))
            number += times * (len(values) - 1)
        elif eqn.primitive.name not in _PASSING:
            continue
        if reads[made] == 1 and made not in kept:
            open_bytes[made] = max(of_values)
    return Merged(saved, number)
