"""Chooses the dimension classes that devices divide, for each kind of division.

By ``data``, the class of a microbatch's dimensions with the least all-reduce traffic: rows do not depend on
one another. By ``sequence``, another class of values between layers that divides most of the work and not the
weights. By ``model``, classes of weights: hidden units, heads, entries of a vocabulary, experts; each saves
work and memory, and costs all-reduces. They are taken in the order of savings per all-reduced byte, no two
of one value. For a transformer this gives the pairs of Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053,
section 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping, Set

from mpmd.compiler.jaxprs.flat import Value
from mpmd.ir.plan import TaskType
from mpmd.planner.layer_profile import Kind
from mpmd.planner.profiling.class_costs import ClassCosts
from mpmd.planner.profiling.classes import Class
from mpmd.planner.profiling.layered_step import LayeredLoop, LayeredStep

_OPERATIONS_PER_BYTE = 200
"""The operations that equal a byte of weights that a device need not hold: about as many as accelerators
compute while they read a byte. They only rank classes; a search prices them by the cluster's own numbers."""

_LEAST = 1 / 16
"""Threshold for a class: its savings per all-reduced byte, over the savings of the best class of a layer.
The rank of an adapter stays below it: its all-reduces are as large as the all-reduces of hidden units,
and it has next to no work."""

_NEARLY = 0.9
"""Threshold for the work of a class, over the most work of any class. Of the classes above it, the class
with the least all-reduces is chosen."""

_LEAST_OF_WORK = 1 / 2
"""The least share of all work that a sequence divides."""

_MOST_OF_WEIGHTS = 1 / 4
"""The largest share of a layer's weights that rows and sequences divide, such as embeddings of positions."""


def choose_classes(
    step: LayeredStep, accumulated: Mapping[TaskType, Container[Value]]
) -> dict[Kind, frozenset[Class]]:
    """The classes of each kind; rows and sequences are found for each loop.

    Args:
      accumulated: for each task, the values that only add to accumulators.
    """
    rows = [[step.classes.of(dim.value, dim.dim) for dim in loop.divisible] for loop in step.loops]
    between = [_between_layers(step, loop) for loop in step.loops]
    costs = ClassCosts(step, {*itertools.chain(*rows, *between)})
    allowed = _without_weights(step, costs)

    def cheapest(candidates: Iterable[Class], least: float) -> frozenset[Class]:
        shared = {one: costs.shared(one, accumulated) for one in dict.fromkeys(candidates) if one in allowed}
        most = max((of_class.operations for of_class in shared.values()), default=0.0)
        enough = {
            one: of_class.all_reduces.nbytes
            for one, of_class in shared.items()
            if of_class.operations >= max(least, _NEARLY * most)
        }
        return frozenset({min(enough, key=lambda one: enough[one])} if enough else ())

    data = frozenset[Class]().union(*(cheapest(of_loop, 1.0) for of_loop in rows))
    sequence: frozenset[Class] = frozenset()
    for loop, of_rows, of_loop in zip(step.loops, rows, between, strict=True):
        most = sum(number for task_type, number in step.operations.items() if task_type.stage in loop.layers)
        others = (one for one in of_loop or of_rows if one not in data)
        sequence |= cheapest(others, _LEAST_OF_WORK * most)
    return {"data": data, "sequence": sequence, "model": _of_weights(costs, data, data | sequence)}


def _between_layers(step: LayeredStep, loop: LayeredLoop) -> list[Class]:
    return [
        one
        for layer in loop.layers
        for var, _ in step.received(layer)
        for one in step.classes.of_value(step.flat.value(var))
    ]


def _without_weights(step: LayeredStep, costs: ClassCosts) -> set[Class]:
    weights = [sum(map(step.nbytes, step.weights(layer))) for layer in range(step.num_layers)]
    return {
        one
        for one in costs.together
        if all(
            nbytes <= _MOST_OF_WEIGHTS * weights[layer]
            for layer, nbytes in costs.of_weights.get(one, {}).items()
        )
    }


def _of_weights(costs: ClassCosts, rows: Set[Class], taken: Set[Class]) -> frozenset[Class]:
    savings: dict[Class, float] = {}
    best: dict[int, float] = {}
    for one, nbytes in costs.of_weights.items():
        if one not in taken and costs.size(one) > 1 and not costs.gathers_whole(one, rows):
            shared = costs.shared(one, {})
            saved = shared.operations + _OPERATIONS_PER_BYTE * sum(nbytes.values())
            savings[one] = saved / max(1.0, shared.all_reduces.nbytes)
            for layer in nbytes:
                best[layer] = max(best.get(layer, 0.0), savings[one])
    chosen: set[Class] = set()
    devices = 0  # what the number of devices has to divide; any number divides 0
    for one in sorted(savings, key=lambda one: -savings[one]):
        enough = any(savings[one] >= _LEAST * best[layer] for layer in costs.of_weights[one])
        together = math.gcd(devices, costs.size(one))
        if enough and together > 1 and not chosen & costs.together[one]:
            chosen.add(one)
            devices = together
    return frozenset(chosen)
