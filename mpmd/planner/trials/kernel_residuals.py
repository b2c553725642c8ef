"""The residuals of flash attention: values that a plan keeps from a forward to its backward, and it does not.

The backward of flash attention recomputes the scores. The equations of ``jax.nn.dot_product_attention`` keep
them, so a plan that is compiled from the equations has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import NamedTuple

from jax.extend.core import Jaxpr, Var

from mpmd.compiler.jaxprs.disjoint_sets import DisjointSets
from mpmd.compiler.jaxprs.flat import FlatEquations, Value
from mpmd.ir.plan import Aval, ConstantLeaf, Executable, Free, InputLeaf, Name, OutputLeaf, Plan, Run


class Positions(NamedTuple):
    """Indices into an executable's inputs and outputs."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()


NO_POSITIONS = Positions()


def kernel_residuals(plan: Plan, jaxprs: Mapping[str, Jaxpr], flash_attention: bool) -> dict[str, Positions]:
    """Returns the positions of residuals of flash attention among the inputs and outputs of executables.

    A value is a residual if attention computes it in one task, and only attention reads it in later tasks.

    Args:
      jaxprs: the jaxpr of each executable, by name.
      flash_attention: whether ``jax.nn.dot_product_attention`` is a kernel.
    """
    positions = {name: _within_calls(jaxpr, flash_attention) for name, jaxpr in jaxprs.items()}
    if not any(positions_of.outputs for positions_of in positions.values()):
        return {}
    same: DisjointSets[Hashable] = DisjointSets()
    others = [*_elsewhere(plan)]
    for program in plan.programs:
        for run in program.runs:
            of_run = positions[run.executable]
            for kind, names, within in zip(("in", "out"), (run.inputs, run.outputs), of_run, strict=True):
                for i, name in enumerate(names):
                    position, value = (run.executable, kind, i), (program.mpmd_idx, name)
                    same.join((position, value))
                    if i not in within:
                        others.append(value)
    outside = {same.find(value) for value in others}

    def residuals(executable: str, kind: str, within: Collection[int]) -> frozenset[int]:
        return frozenset(i for i in within if same.find((executable, kind, i)) not in outside)

    return {
        name: Positions(residuals(name, "in", within.inputs), residuals(name, "out", within.outputs))
        for name, within in positions.items()
    }


def _elsewhere(plan: Plan) -> Iterator[tuple[int, Name]]:
    """Yields the group and the name of each value in a message, argument, constant or result."""
    for program in plan.programs:
        for instruction in program.instructions:
            if not isinstance(instruction, Run | Free):
                yield from ((program.mpmd_idx, name) for name in instruction.values)
    leaves: tuple[InputLeaf | ConstantLeaf | OutputLeaf, ...] = (*plan.inputs, *plan.constants, *plan.outputs)
    for leaf in leaves:
        if leaf.name is not None:
            yield from ((mpmd_idx, leaf.name) for mpmd_idx in leaf.mpmd_idxs)


def _within_calls(jaxpr: Jaxpr, flash_attention: bool) -> Positions:
    """The inputs that flash attention alone reads, and the results that it alone makes and reads."""
    flat = FlatEquations(flash_attention=flash_attention)
    operations = flat.add(jaxpr.eqns)
    of_attention = [op for op in operations if op.kernel is not None and op.kernel.kernel is None]
    if not of_attention:
        return NO_POSITIONS
    same: DisjointSets[Value] = DisjointSets()
    for one in flat.passed:
        same.join((one.outer, one.inner))
    made = {same.find(value) for operation in of_attention for value in operation.makes}
    touched = made | {same.find(value) for operation in of_attention for value in operation.values}
    others = {
        same.find(value)
        for operation in operations
        if operation.kernel is None or operation.kernel.kernel is not None
        for value in operation.values
    }

    def within(var: object) -> Value | None:
        if not isinstance(var, Var) or not var.aval.shape:  # type: ignore[attr-defined]
            return None
        value = same.find(flat.value(var))
        return value if value in touched - others else None

    results = {same.find(flat.value(var)) for var in jaxpr.outvars if isinstance(var, Var)}
    read = (i for i, var in enumerate(jaxpr.invars) if within(var) not in (None, *results))
    return Positions(
        frozenset(read), frozenset(i for i, var in enumerate(jaxpr.outvars) if within(var) in made)
    )


def without_residuals(executable: Executable, residuals: Positions) -> Executable:
    """An executable whose residuals of kernels have no elements."""
    return dataclasses.replace(
        executable,
        inputs=tuple(_emptied(executable.inputs, residuals.inputs)),
        outputs=tuple(_emptied(executable.outputs, residuals.outputs)),
    )


def _emptied(avals: Collection[Aval], positions: Collection[int]) -> Iterator[Aval]:
    for i, aval in enumerate(avals):
        yield dataclasses.replace(aval, shape=(0, *aval.shape[1:])) if i in positions else aval
