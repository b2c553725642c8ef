"""The purposes of a group's values."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from mpmd.ir.plan import AnyTask, GroupProgram, Name, OutsideTask, Plan, Recv, TaskType

Kind = Literal["parameters", "arguments", "accumulators", "activations", "outside", "received"]
"""The purpose of a value, as ``mpmd.memory.group.MemoryParts`` describes it."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""All purposes, in the order in which amounts by purpose are listed."""


def kinds_of(plan: Plan, program: GroupProgram, updated: Collection[Name]) -> dict[Name, Kind]:
    """The purpose of each value of a group.

    An accumulator is what a task hands to the next task of its kind and stage, what the tasks of a stage
    leave behind after the loop, and what they take over from before it.

    Args:
      updated: the arguments that the step returns updated.
    """
    kinds: dict[Name, Kind] = {
        name: "parameters" if name in updated else "arguments" for name in plan.resident(program.mpmd_idx)
    }
    makers: dict[Name, AnyTask] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Recv):
            kinds |= dict.fromkeys(instruction.values, "received")
    for run in program.runs:
        donated = {run.inputs[i] for i in plan.executable(run.executable).donated}
        for name in run.inputs:
            maker = makers.get(name)
            if maker is not None and _accumulates(maker, run.task, name in donated):
                kinds[name] = "accumulators"
        for name in run.outputs:
            makers[name] = run.task
            kinds[name] = "outside" if isinstance(run.task, OutsideTask) else "activations"
    for leaf in plan.outputs_of(program.mpmd_idx).values():
        if not isinstance(makers.get(leaf.name, OutsideTask("after", 0)), OutsideTask):
            kinds[leaf.name] = "accumulators"
    return kinds


def _accumulates(maker: AnyTask, reader: AnyTask, donated: bool) -> bool:
    if isinstance(maker, OutsideTask):
        return donated and not isinstance(reader, OutsideTask)
    return isinstance(reader, OutsideTask) or not _types(maker).isdisjoint(_types(reader))


def _types(task: AnyTask) -> set[TaskType]:
    assert not isinstance(task, OutsideTask)
    return {member.type for member in task.tasks}
