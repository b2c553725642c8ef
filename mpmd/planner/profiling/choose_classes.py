"""Chooses which dimension classes devices divide, for each kind of division.

By ``data``, the class of a microbatch's dimensions for which the least is summed: rows do not depend on one
another. By ``sequence``, another class of values between layers that divides most of the work and not the
weights. By ``model``, classes of weights: hidden units, heads, entries of a vocabulary, experts; each saves
work and memory, and costs sums. They are taken in the order of what they save for a byte summed, and no two
of one value. For a transformer this gives the pairs of Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053,
section 3.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set

from mpmd.compiler.graph import Work
from mpmd.compiler.jaxprs.flat import Value
from mpmd.planner.profile import Kind
from mpmd.planner.profiling.classes import Class, ClassedOperation
from mpmd.planner.profiling.layered_step import LayeredStep
from mpmd.planner.profiling.sharing import Shared, Sharing

_OPERATIONS_PER_BYTE = 200
"""What a byte of weights that a device need not hold counts for, beside operations: about what accelerators
compute while they read a byte. It only ranks classes; a search prices them by the cluster's own numbers."""

_LEAST = 1 / 16
"""Of what the best class of a layer saves for a byte summed; a class that saves less is left whole. So it is
for the rank of an adapter, which has sums as large as those of the hidden units, and next to no work."""

_LEAST_OF_WORK = _MOST_OF_WEIGHTS = 0.5
"""Rows and sequences divide at least so much of the work, and sequences at most so much of the weights."""


class ClassChooser:
    """The classes to divide by, for each kind.

    Args:
      accumulated: for each task, the values that only add to accumulators.
      microbatch, between: the classes of dimensions of a microbatch, and of values between layers.
    """

    def __init__(
        self,
        step: LayeredStep,
        accumulated: Mapping[Work, Collection[Value]],
        microbatch: Iterable[Class],
        between: Iterable[Class],
    ):
        self._step = step
        self._accumulated = accumulated
        self._microbatch = list(dict.fromkeys(microbatch))
        self._between = list(dict.fromkeys(between))
        self._of_weights = self._classes_of_weights()
        candidates = {*self._microbatch, *self._between, *self._of_weights}
        self._touched: dict[Class, dict[Work, list[ClassedOperation]]] = {one: {} for one in candidates}
        self._together: dict[Class, set[Class]] = {one: set() for one in candidates}
        for work, members in step.tasks.items():
            for member in members:
                self._note(work, member)

    def _note(self, work: Work, member: ClassedOperation) -> None:
        operation = member.operation
        touched: set[Class] = set()
        for value in operation.values:
            found = self._touched.keys() & set(self._step.classes.of_value(value))
            touched |= found
            if len(found) > 1:
                for one in found:
                    self._together[one] |= found - {one}
        for one in touched:
            self._touched[one].setdefault(work, []).append(member)

    def _classes_of_weights(self) -> dict[Class, dict[int, float]]:
        """For each class, the bytes of each layer's weights that have it.

        The iterations of a loop, of which each reads its own part, are no class that devices can divide.
        """
        step = self._step
        iterations = {step.classes.of(one.outer, 0) for one in step.flat.passed if one.axis}
        found: dict[Class, dict[int, float]] = {}
        for layer in range(step.num_layers):
            for weight in step.weights(layer):
                for one in set(step.classes.of_value(weight)) - iterations:
                    of_layers = found.setdefault(one, {})
                    of_layers[layer] = of_layers.get(layer, 0.0) + step.nbytes(weight)
        return found

    def choose(self, operations: float) -> dict[Kind, frozenset[Class]]:
        """The classes of each kind.

        Args:
          operations: of all tasks.
        """
        most = _LEAST_OF_WORK * operations
        data = self._cheapest(self._microbatch, most)
        step = self._step
        weights = sum(
            step.nbytes(weight) for layer in range(step.num_layers) for weight in step.weights(layer)
        )
        others = [one for one in self._between if one not in data]
        sequence = self._cheapest(others, most, _MOST_OF_WEIGHTS * weights)
        return {"data": data, "sequence": sequence, "model": self._of_model(data | sequence)}

    def _cheapest(
        self, candidates: Iterable[Class], least: float, most_weights: float = math.inf
    ) -> frozenset[Class]:
        """The class with the least sums, of those that divide enough work, and not too many weights."""
        costs = {}
        for one in candidates:
            shared = sum(self._shared(one).values(), Shared())
            if shared.operations >= least and sum(self._of_weights.get(one, {}).values()) <= most_weights:
                costs[one] = shared.reduced
        return frozenset({min(costs, key=lambda one: costs[one])} if costs else ())

    def _shared(self, one: Class) -> dict[int, Shared]:
        """What each layer shares if only this class is divided."""
        sharing = Sharing(self._step.flat, self._step.classes, frozenset({one}))
        found: dict[int, Shared] = {}
        for work, members in self._touched[one].items():
            shared = sharing.task(members, self._accumulated[work])
            found[work.stage] = found.get(work.stage, Shared()) + shared
        return found

    def _of_model(self, taken: Set[Class]) -> frozenset[Class]:
        savings: dict[Class, float] = {}
        best: dict[int, float] = {}
        for one, nbytes in self._of_weights.items():
            if one not in taken:
                shared = sum(self._shared(one).values(), Shared())
                saved = shared.operations + _OPERATIONS_PER_BYTE * sum(nbytes.values())
                savings[one] = saved / max(1.0, shared.reduced)
                for layer in nbytes:
                    best[layer] = max(best.get(layer, 0.0), savings[one])
        chosen: set[Class] = set()
        for one in sorted(savings, key=lambda one: -savings[one]):
            enough = any(savings[one] >= _LEAST * best[layer] for layer in self._of_weights[one])
            if enough and not chosen & self._together[one]:
                chosen.add(one)
        return frozenset(chosen)
