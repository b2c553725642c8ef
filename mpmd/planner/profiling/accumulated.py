"""Finds the values of a task that only add to accumulators, such as gradients.

Where such a value is a sum of which each device has a part, the parts can be added up once per step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from mpmd.compiler.jaxprs.flat import Operation, Passed, Value
from mpmd.compiler.shard.linear import linear_positions


class Accumulated:
    """The values of a task that are read only to add linear functions of their elements to accumulators.

    Args:
      passed: the values that loops pass into and out of their bodies.
      updated: the updated accumulators, which the task computes.
      makes: the values that the task computes for other tasks.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        passed: Iterable[Passed],
        updated: Collection[Value],
        makes: Collection[Value],
    ):
        self._updated = frozenset(updated)
        self._results: dict[Value, list[Value]] = {}  # for each value, those that are linear in it
        sources: dict[Value, list[Value]] = {}  # and the other way round
        wrong = {value for value in makes if value not in self._updated}
        for source, result, is_linear in _flows(operations, passed):
            if is_linear:
                self._results.setdefault(source, []).append(result)
                sources.setdefault(result, []).append(source)
            else:
                wrong.add(source)
        self._wrong = _reached(wrong, sources)

    def __contains__(self, value: object) -> bool:
        return value not in self._wrong

    def updated_by(self, values: Iterable[Value]) -> frozenset[Value]:
        return self._updated & _reached(set(values), self._results)


def _flows(operations: Iterable[Operation], passed: Iterable[Passed]) -> Iterator[tuple[Value, Value, bool]]:
    """Yields each value with a result that is computed from it, and whether the result is linear in the
    value."""
    for operation in operations:
        linear = {i for positions in linear_positions(operation.eqn) for i in positions}
        for i, value in enumerate(operation.reads):
            if value is not None:
                yield from ((value, result, i in linear) for result in operation.makes)
    for one in passed:
        yield (one.outer, one.inner, True) if one.into else (one.inner, one.outer, True)


def _reached(start: set[Value], further: Mapping[Value, Iterable[Value]]) -> set[Value]:
    reached, waiting = set(start), list(start)
    while waiting:
        new = set(further.get(waiting.pop(), ())) - reached
        reached |= new
        waiting += new
    return reached
