"""What a plan costs, by simulating it with given costs of tasks and links."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from mpmd.ir.plan import Name, OutsideTask, Plan, TaskType
from mpmd.ir.routes import Topology
from mpmd.memory import EarliestArrival, GroupMemory, Holding, device_bytes, group_memories
from mpmd.planner.candidate import Memory, Prediction
from mpmd.simulate import Costs, MessageBytes, simulate
from mpmd.simulate.costs import types_of


def predict(
    plan: Plan,
    topology: Topology | MessageBytes,
    arrivals: Mapping[tuple[tuple[int, int], int], EarliestArrival],
    updated: Collection[int],
    costs: Costs,
    source: str,
    communication: float = 0.0,
    holding: Holding = Holding.RECEIVER,
) -> Prediction:
    """What a verified plan costs.

    Args:
      topology: of its groups, or the bytes of its messages, as ``simulate`` takes them.
      arrivals: when its messages can be there, as ``mpmd.verify.verify`` says.
      updated: the positions of the arguments that the step returns updated.
      costs: of its tasks and links, in seconds.
      source: where they come from.
      communication: the share of the tasks' time that goes into sums over devices and gathered weights.
      holding: where messages are until they are used.
    """
    simulation = simulate(plan, costs, topology=topology)
    names = {leaf.name for i, leaf in enumerate(plan.inputs) if i in updated and leaf.name}
    memories = memories_of(plan, arrivals, holding, names)
    worst = max(range(len(memories)), key=lambda group: memories[group].peak_bytes)
    return Prediction(
        seconds=simulation.makespan,
        bubble=simulation.bubble,
        communication=communication,
        memory=memory_of_group(plan, worst, memories[worst], names),
        stage_seconds=stage_seconds(plan, costs),
        source=source,
    )


def memories_of(
    plan: Plan,
    arrivals: Mapping[tuple[tuple[int, int], int], EarliestArrival],
    holding: Holding,
    updated: Collection[Name],
) -> tuple[GroupMemory, ...]:
    """What the devices of each group need, if the messages of all edges are in the same place."""
    edges = itertools.permutations(range(len(plan.programs)), 2)
    return group_memories(plan, arrivals, dict.fromkeys(edges, holding), updated)


def stage_seconds(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """The seconds of all tasks of each stage, for one microbatch."""
    cells = {
        types_of(run.task)
        for program in plan.programs
        for run in program.runs
        if not isinstance(run.task, OutsideTask)
    }
    alone = costs.times({member for types in cells for member in types})
    found: dict[TaskType, float] = {}
    for types in sorted(cells, key=len, reverse=True):  # what a task takes alone is known better
        found |= zip(types, costs.share(types, [alone[member] for member in types]), strict=True)
    num_stages = 1 + max((stage for _, stage in found), default=-1)
    return tuple(
        sum(seconds for (_, of_task), seconds in found.items() if of_task == stage)
        for stage in range(num_stages)
    )


def memory_of_group(plan: Plan, mpmd_idx: int, memory: GroupMemory, updated: Collection[Name]) -> Memory:
    """The parts of a group's peak.

    Of the arguments that the step updates, those that the loop reads are weights; the others, and all else
    that is there at the start or is made outside the loop, count as state.
    """
    peak, axes = memory.peak, plan.submesh(mpmd_idx)
    read = {
        name
        for run in plan.programs[mpmd_idx].runs
        if not isinstance(run.task, OutsideTask)
        for name in run.inputs
    }
    weights = min(
        peak.parameters,
        sum(
            device_bytes(leaf.aval, leaf.spec, axes)
            for leaf in plan.inputs_of(mpmd_idx).values()
            if leaf.name in updated and leaf.name in read
        ),
    )
    return Memory(
        group=mpmd_idx,
        weights=weights,
        gradients=peak.accumulators,
        state=peak.parameters - weights + peak.arguments + peak.outside,
        residuals=peak.activations,
        messages=peak.received + peak.messages,
        temporaries=peak.temporaries or 0,
    )
