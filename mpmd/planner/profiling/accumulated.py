"""Finds the values of a task that only add to accumulators, such as gradients.

If devices have parts of the sum that such a value is, the parts can be added up once per step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mpmd.compiler.jaxprs.flat import Operation, Passed, Value
from mpmd.compiler.shard.linear import linear_positions


def accumulated_values(
    operations: Sequence[Operation],
    passed: Iterable[Passed],
    updated: Collection[Value],
    makes: Collection[Value],
) -> set[Value]:
    """The values of a task that nothing reads but what adds them, or what is linear in them, to accumulators.

    Args:
      passed: what loops hand in and out.
      updated: the accumulators' states that the task makes.
      makes: what it makes for other tasks.
    """
    sources: dict[Value, list[Value]] = {}  # for each value, those that it is linear in
    wrong = {value for value in makes if value not in updated}
    made: set[Value] = set()
    for operation in operations:
        linear = {i for positions in linear_positions(operation.eqn) for i in positions}
        for i, value in enumerate(operation.reads):
            if value is not None and i in linear:
                for result in operation.makes:
                    sources.setdefault(result, []).append(value)
            elif value is not None:
                wrong.add(value)
        made.update(operation.makes)
    for one in passed:
        source, target = (one.outer, one.inner) if one.into else (one.inner, one.outer)
        sources.setdefault(target, []).append(source)
    waiting = list(wrong)
    while waiting:
        for source in sources.get(waiting.pop(), ()):
            if source not in wrong:
                wrong.add(source)
                waiting.append(source)
    return made - wrong
