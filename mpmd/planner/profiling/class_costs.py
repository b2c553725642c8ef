"""Savings and costs of dividing one class of dimensions."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping

from mpmd.compiler.jaxprs.flat import Value
from mpmd.ir.plan import TaskType
from mpmd.planner.profiling.classes import Class, ClassedOperation
from mpmd.planner.profiling.layered_step import LayeredStep
from mpmd.planner.profiling.sharing import Shared, Sharing


class ClassCosts:
    """Sums over the operations that have a class.

    Args:
      others: classes to record in addition to the classes of weights.

    Attributes:
      of_weights: for each class, the bytes of each layer's weights that have it.
      together: for each class, the classes of further dimensions of the values that have it.
    """

    def __init__(self, step: LayeredStep, others: Iterable[Class]):
        self._step = step
        self.of_weights = _of_weights(step)
        known = {*self.of_weights, *others}
        self.together: dict[Class, set[Class]] = {one: set() for one in known}
        self._sharing = {one: Sharing(step.flat, step.classes, frozenset({one})) for one in known}
        self._touched: dict[Class, dict[TaskType, list[ClassedOperation]]] = {one: {} for one in known}
        for task_type, members in step.tasks.items():
            for member in members:
                self._note(task_type, member)

    def _note(self, task_type: TaskType, member: ClassedOperation) -> None:
        touched: set[Class] = set()
        for value in member.operation.values:
            of_value = self._touched.keys() & set(self._step.classes.of_value(value))
            touched |= of_value
            for one in of_value:
                self.together[one] |= of_value - {one}
        for one in touched:
            self._touched[one].setdefault(task_type, []).append(member)

    def shared(self, one: Class, accumulated: Mapping[TaskType, Container[Value]]) -> Shared:
        """The work that devices share, and the bytes that they all-reduce, if this class alone is divided.

        Args:
          accumulated: for each task, the values that only add to accumulators that may hold parts of sums.
        """
        sharing = self._sharing[one]
        tasks = self._touched[one].items()
        return sum(
            (sharing.task(members, accumulated.get(task_type, ())) for task_type, members in tasks), Shared()
        )

    def size(self, one: Class) -> int:
        """The size that the number of devices has to divide."""
        values = {value for member in self._members(one) for value in member.operation.values}
        return self._sharing[one].largest(values)

    def gathers_whole(self, one: Class, rows: Collection[Class]) -> bool:
        """Whether an operation that devices cannot share along the class reads a divided value that
        depends only on weights."""
        sharing = self._sharing[one]
        for member in self._members(one):
            if all(of_class != one for of_class, _ in member.uses):
                for value in member.operation.reads:
                    if value is not None and sharing.dim(value) is not None and self._is_weight(value, rows):
                        return True
        return False

    def _is_weight(self, value: Value, rows: Collection[Class]) -> bool:
        return bool(rows) and not set(rows) & set(self._step.classes.of_value(value))

    def _members(self, one: Class) -> Iterable[ClassedOperation]:
        for members in self._touched[one].values():
            yield from members


def _of_weights(step: LayeredStep) -> dict[Class, dict[int, float]]:
    """For each class, the bytes of each layer's weights that have it.

    The iterations of a loop, of which each reads its own part, are no class that devices can divide.
    """
    iterations = {step.classes.of(one.outer, 0) for one in step.flat.passed if one.axis}
    nbytes: dict[Class, dict[int, float]] = {}
    for layer in range(step.num_layers):
        for weight in step.weights(layer):
            for one in set(step.classes.of_value(weight)) - iterations:
                of_layers = nbytes.setdefault(one, {})
                of_layers[layer] = of_layers.get(layer, 0.0) + step.nbytes(weight)
    return nbytes
