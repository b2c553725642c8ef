"""``jax.debug_nans`` and ``jax.debug_infs`` of the caller, for the tasks of a step.

As under ``jax.jit``, a value within the computation may be NaN and do no harm, as where ``jnp.where`` drops
it. So values that a task passes on are checked, and residuals for the backward of its microbatch are not.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.ir.plan import AnyTask, GroupProgram, Name, OutsideTask, Plan, Send


class NonFinitePolicy(NamedTuple):
    nans: bool
    infs: bool

    @staticmethod
    def here() -> NonFinitePolicy | None:
        """The values that JAX's configuration refuses in this thread; ``None`` if it refuses none."""
        config = jax.config
        refused = NonFinitePolicy(config.jax_debug_nans, config.jax_debug_infs)  # type: ignore[attr-defined]
        return refused if any(refused) else None

    def __str__(self) -> str:
        return " or ".join(name for name, is_refused in zip(("nan", "inf"), self, strict=True) if is_refused)


def passed_on(plan: Plan, program: GroupProgram) -> dict[Name, str]:
    """The floating-point values that tasks of a group pass on, each with its destination.

    A value is passed on when it is sent, a result of the step, or read for another stage or microbatch; this
    includes accumulators.
    """
    makers = {name: run.task for run in program.runs for name in run.outputs}
    uses: dict[Name, str] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Send):
            uses |= {
                name: f"sent to group {instruction.dst}" for name in instruction.values if name in makers
            }
    for run in reversed(program.runs):
        for name in run.inputs:
            if name in makers and _scope(makers[name]).isdisjoint(_scope(run.task)):
                uses[name] = f"which {plan.task_text(run.task)} reads"
    for leaf in plan.outputs_of(program.mpmd_idx).values():
        if leaf.name in makers:
            uses[leaf.name] = f"the result{leaf.path}"
    avals = plan.avals()
    return {
        name: f"{name}: {avals[name]}, {use}"
        for name, use in uses.items()
        if jnp.issubdtype(jnp.dtype(avals[name].dtype), jnp.inexact)
    }


def _scope(task: AnyTask) -> frozenset[Hashable]:
    if isinstance(task, OutsideTask):
        return frozenset({task})
    return frozenset((member.stage, member.microbatch) for member in task.tasks)


def first_refused(arrays: Sequence[jax.Array], refused: NonFinitePolicy) -> int | None:
    """All processes of a group come to the same answer, because the devices compute it together."""
    refused_positions = np.flatnonzero(np.asarray(_have(tuple(arrays), refused)))
    return int(refused_positions[0]) if len(refused_positions) else None


@functools.partial(jax.jit, static_argnums=1)
def _have(arrays: tuple[jax.Array, ...], refused: NonFinitePolicy) -> jax.Array:
    def has(array: jax.Array) -> jax.Array:
        nan, inf = jnp.isnan(array).any(), jnp.isinf(array).any()
        return (nan & refused.nans) | (inf & refused.infs)

    return jnp.stack([has(array) for array in arrays])
