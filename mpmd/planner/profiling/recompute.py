"""The values that a layer keeps, and the work that it does again, under each policy of rematerialisation.

Read off the layer's forward without rematerialisation: from the residuals that its backward needs back to the
values that the policy keeps, as ``jax.checkpoint`` decides for each equation.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from mpmd.compiler.jaxprs.equations import avals_of
from mpmd.compiler.jaxprs.flat import Value
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
      positions: of the recomputed operations, as indices into the layer's forward, in order.
    """

    nbytes: float
    kept: frozenset[Value]
    positions: list[int]


def recomputed(step: LayeredStep, layer: int, policy: Remat) -> Recomputed:
    members = step.tasks.get(TaskType("fwd", layer), ())
    received = {step.flat.value(var) for var, _ in step.received(layer)}
    needed = {step.flat.value(var) for var in step.residuals(layer)}
    maker = {value: i for i, one in enumerate(members) for value in one.operation.makes}
    is_saveable = _SAVEABLE[policy]
    eqns = [one.operation.eqn for one in members]
    saved = [is_saveable(eqn.primitive, *avals_of(eqn.invars), **eqn.params) for eqn in eqns]
    kept = dict[Value, float]()
    again, seen = set[int](), set[Value](step.kernel_values.inside)
    pending = [*needed]
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if (i := maker.get(value)) is None:
            sources = step.passed_from.get(value, ())
            if value in received or (value in needed and not sources):
                kept[value] = step.nbytes(value)
            pending += sources
        elif saved[i]:
            kept[value] = step.nbytes(value) * members[i].operation.times
        else:
            again.add(i)
            pending += (read for read in members[i].operation.reads if read is not None)
    return Recomputed(sum(kept.values()), frozenset(kept), sorted(again))
