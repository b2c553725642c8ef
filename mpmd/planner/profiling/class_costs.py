"""What it saves and costs to divide one class of dimensions."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping

from mpmd.compiler.jaxprs.flat import Value
from mpmd.ir.plan import TaskType
from mpmd.planner.profiling.classes import Class, ClassedOperation
from mpmd.planner.profiling.layered_step import LayeredStep
from mpmd.planner.profiling.sharing import Shared, Sharing


class ClassCosts:
    """Sums over the operations that have a class.

    Args:
      others: classes to know beside those of weights.

    Attributes:
      of_weights: for each class, the bytes of each layer's weights that have it.
      together: for each class, those that are other dimensions of a value.
    """

    def __init__(self, step: LayeredStep, others: Iterable[Class]):
        self._step = step
        self.of_weights = _of_weights(step)
        known = {*self.of_weights, *others}
        self.together: dict[Class, set[Class]] = {one: set() for one in known}
        self._touched: dict[Class, dict[TaskType, list[ClassedOperation]]] = {one: {} for one in known}
        for work, members in step.tasks.items():
            for member in members:
                self._note(work, member)

    def _note(self, work: TaskType, member: ClassedOperation) -> None:
        touched: set[Class] = set()
        for value in member.operation.values:
            found = self._touched.keys() & set(self._step.classes.of_value(value))
            touched |= found
            if len(found) > 1:
                for one in found:
                    self.together[one] |= found - {one}
        for one in touched:
            self._touched[one].setdefault(work, []).append(member)

    def shared(self, one: Class, accumulated: Mapping[TaskType, Container[Value]]) -> Shared:
        """What devices share, and sum, if this class alone is divided.

        Args:
          accumulated: for each task, the values that only add to accumulators that may hold parts of sums.
        """
        sharing = self._sharing(one)
        tasks = self._touched[one].items()
        return sum((sharing.task(members, accumulated.get(work, ())) for work, members in tasks), Shared())

    def size(self, one: Class) -> int:
        """What the number of devices has to divide."""
        sharing = self._sharing(one)
        values = {value for member in self._members(one) for value in member.operation.values}
        return math.gcd(*(size for value in values if (size := sharing.size(value)) is not None))

    def gathers_whole(self, one: Class, rows: Collection[Class]) -> bool:
        """Whether an operation that cannot be shared reads a divided weight, or what is made of weights."""
        sharing = self._sharing(one)
        for member in self._members(one):
            if all(of_class != one for of_class, _ in member.uses):
                for value in member.operation.reads:
                    if value is not None and sharing.dim(value) is not None and self._is_weight(value, rows):
                        return True
        return False

    def _is_weight(self, value: Value, rows: Collection[Class]) -> bool:
        return bool(rows) and not set(rows) & set(self._step.classes.of_value(value))

    def _sharing(self, one: Class) -> Sharing:
        return Sharing(self._step.flat, self._step.classes, frozenset({one}))

    def _members(self, one: Class) -> Iterable[ClassedOperation]:
        for members in self._touched[one].values():
            yield from members


def _of_weights(step: LayeredStep) -> dict[Class, dict[int, float]]:
    """For each class, the bytes of each layer's weights that have it.

    The iterations of a loop, of which each reads its own part, are no class that devices can divide.
    """
    iterations = {step.classes.of(one.outer, 0) for one in step.flat.passed if one.axis}
    found: dict[Class, dict[int, float]] = {}
    for layer in range(step.num_layers):
        for weight in step.weights(layer):
            for one in set(step.classes.of_value(weight)) - iterations:
                of_layers = found.setdefault(one, {})
                of_layers[layer] = of_layers.get(layer, 0.0) + step.nbytes(weight)
    return found
