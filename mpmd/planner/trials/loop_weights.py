"""Finds the weights that a step computes before its loops, such as gathered or cast ones."""

from __future__ import annotations

from collections.abc import Collection

from mpmd.compiler.jaxprs.equations import is_among, operands
from mpmd.ir.plan import GroupProgram, Name, OutsideTask
from mpmd.program import Program


def weights_before_loops(program: Program, updated: Collection[Name]) -> frozenset[Name]:
    """The values that tasks of stages read, and that tasks outside of loops compute from updated arguments.

    Args:
      updated: the names of the arguments that the step updates.
    """
    weights = {name for group in program.plan.programs for name in _weights_of(program, group, updated)}
    return frozenset(weights)


def _weights_of(program: Program, group: GroupProgram, updated: Collection[Name]) -> set[Name]:
    of_arguments, read = set(updated), set[Name]()
    for run in group.runs:
        if not isinstance(run.task, OutsideTask):
            read.update(run.inputs)
            continue
        jaxpr = program.jaxprs[group.mpmd_idx, run.task]
        pairs = zip(jaxpr.invars, run.inputs, strict=True)
        dependent = {var for var, name in pairs if name in of_arguments}
        for eqn in jaxpr.eqns:
            if not dependent.isdisjoint(operands(eqn)):
                dependent.update(eqn.outvars)
        results = zip(jaxpr.outvars, run.outputs, strict=True)
        of_arguments.update(name for atom, name in results if is_among(atom, dependent))
    return (of_arguments & read) - set(updated)
