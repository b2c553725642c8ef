"""The values that a layer keeps, and the work that it does again, under each policy of rematerialisation.

Read off the layer's forward without rematerialisation: from the residuals that its backward needs back to the
values that the policy keeps, as ``jax.checkpoint`` decides for each equation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax

from mpmd.compiler.jaxprs.equations import avals_of
from mpmd.compiler.jaxprs.flat import FlatEquations, Operation, Value
from mpmd.ir.plan import TaskType
from mpmd.language.remat import Remat
from mpmd.planner.profiling.layered_step import LayeredStep

POLICIES = tuple(policy for policy in Remat if policy is not Remat.NONE)

_SAVEABLE = {
    Remat.DOTS_SAVEABLE: jax.checkpoint_policies.dots_saveable,
    Remat.DOTS_WITH_NO_BATCH_DIMS_SAVEABLE: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    Remat.NOTHING_SAVEABLE: jax.checkpoint_policies.nothing_saveable,
}


class Recomputed(NamedTuple):
    """The values that a layer keeps, and the operations that its backward computes again.

    Attributes:
      nbytes: bytes of the values that the layer keeps.
      kept: the values that the layer keeps; values inside of scans are kept for each iteration.
      positions: of the recomputed operations among those of the layer's forward, in order.
    """

    nbytes: float
    kept: frozenset[Value]
    positions: list[int]


class RecomputedLayers:
    """The values that the layers of a step keep, and the work that they do again."""

    def __init__(self, step: LayeredStep):
        self._step = step
        self._sources = _sources(step.flat)

    def of_layer(self, layer: int, policy: Remat) -> Recomputed:
        """The values that a layer keeps, and the work that it does again, under a policy."""
        step = self._step
        members = step.tasks.get(TaskType("fwd", layer), ())
        received = {step.flat.value(var) for var, _ in step.received(layer)}
        needed = {step.flat.value(var) for var in step.residuals(layer)}
        maker = {value: i for i, one in enumerate(members) for value in one.operation.makes}
        is_saveable = functools.partial(_is_saveable, _SAVEABLE[policy])
        saveable = (one.operation for one in members if is_saveable(one.operation))
        saved = {value for operation in saveable for value in operation.makes}
        kept = dict[Value, float]()
        again, seen = set[int](), set[Value](step.kernel_values.inside)
        pending = [*needed]
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            if (i := maker.get(value)) is None:
                if value in received or (value in needed and value not in self._sources):
                    kept[value] = step.nbytes(value)
                pending += self._sources.get(value, ())
            elif value in saved:
                kept[value] = step.nbytes(value) * members[i].operation.times
            else:
                again.add(i)
                pending += (read for read in members[i].operation.reads if read is not None)
        return Recomputed(sum(kept.values()), frozenset(kept), sorted(again))


def _is_saveable(policy, operation: Operation) -> bool:
    eqn = operation.eqn
    return bool(policy(eqn.primitive, *avals_of(eqn.invars), **eqn.params))


def _sources(flat: FlatEquations) -> Mapping[Value, list[Value]]:
    """For each value that a loop hands in or out, the values that it is."""
    sources: dict[Value, list[Value]] = {}
    for passed in flat.passed:
        target, source = (passed.inner, passed.outer) if passed.into else (passed.outer, passed.inner)
        sources.setdefault(target, []).append(source)
    return sources
