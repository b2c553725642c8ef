"""The purposes of a group's values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Literal, get_args

from mpmd.ir.plan import (
    AnyTask,
    Aval,
    Executable,
    GroupProgram,
    Name,
    OutsideTask,
    Plan,
    Recv,
    Run,
    TaskType,
)

Kind = Literal["parameters", "arguments", "accumulators", "activations", "outside", "received"]
"""The purpose of a value, as ``mpmd.memory.group.MemoryParts`` describes it."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""All purposes, in the order in which amounts by purpose are listed."""


def kinds_of(plan: Plan, program: GroupProgram, updated: Collection[Name]) -> dict[Name, Kind]:
    """The purpose of each value of a group.

    An accumulator is a value that a task hands to the next task of its kind and stage, a value that the tasks
    of a stage leave after the loop, or a donated value from before the loop. An executable has the states
    that it updates among its first inputs, and the updated states among its first outputs, in the same order.
    So the state that a stage hands from one slice of a microbatch to the next is an accumulator, too.

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
        executable = plan.executable(run.executable)
        donated = {run.inputs[i] for i in executable.donated}
        for name in run.inputs:
            maker = makers.get(name)
            if maker is not None and _accumulates(maker, run.task, name in donated):
                kinds[name] = "accumulators"
        for name in run.outputs:
            makers[name] = run.task
            kinds[name] = "outside" if isinstance(run.task, OutsideTask) else "activations"
        if not isinstance(run.task, OutsideTask):
            states = [aval for name, aval in _inputs(run, executable) if kinds.get(name) == "accumulators"]
            kinds |= dict.fromkeys(_updated(run, executable, states), "accumulators")
    for leaf in plan.outputs_of(program.mpmd_idx).values():
        if not isinstance(makers.get(leaf.name, OutsideTask("after", 0)), OutsideTask):
            kinds[leaf.name] = "accumulators"
    return kinds


def _inputs(run: Run, executable: Executable) -> Iterator[tuple[Name, Aval]]:
    return zip(run.inputs, executable.inputs, strict=True)


def _updated(run: Run, executable: Executable, states: Iterable[Aval]) -> Iterator[Name]:
    """The outputs of a run that are its updated ``states``, in their order."""
    outputs = zip(run.outputs, executable.outputs, strict=True)
    for state in states:
        name = next((name for name, aval in outputs if aval == state), None)
        if name is not None:
            yield name


def _accumulates(maker: AnyTask, reader: AnyTask, donated: bool) -> bool:
    if isinstance(maker, OutsideTask):
        return donated and not isinstance(reader, OutsideTask)
    return isinstance(reader, OutsideTask) or not _types(maker).isdisjoint(_types(reader))


def _types(task: AnyTask) -> set[TaskType]:
    assert not isinstance(task, OutsideTask)
    return {member.type for member in task.tasks}
