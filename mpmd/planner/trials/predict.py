"""Predicts the cost of a plan, by simulating it with given costs of tasks and links."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from mpmd.ir.plan import Name, OutsideTask, Plan, TaskType
from mpmd.ir.routes import Topology
from mpmd.memory import EarliestArrival, GroupMemory, Holding, device_bytes, group_memories, sizes_on_devices
from mpmd.planner.candidate import Memory, Prediction
from mpmd.simulate import Costs, MessageBytes, simulate
from mpmd.simulate.costs import types_of


def predict(
    plan: Plan,
    topology: Topology | MessageBytes,
    arrivals: Mapping[tuple[tuple[int, int], int], EarliestArrival],
    updated: Collection[Name],
    costs: Costs,
    source: str,
    reducing: float = 0.0,
    holding: Holding = Holding.RECEIVER,
    computed_weights: Collection[Name] = (),
    capacities: Sequence[float] = (),
) -> Prediction:
    """The predicted cost of a verified plan.

    Args:
      topology: the topology of its groups, or the bytes of its messages, as ``simulate`` takes them.
      arrivals: when its messages can be there, as ``mpmd.verify.verify`` says.
      updated: the names of the arguments that the step returns updated.
      costs: of its tasks and links, in seconds.
      source: where they come from.
      reducing: the seconds of a step that go into all-reduces and gathered weights.
      holding: where messages are until they are used.
      computed_weights: the weights that tasks outside of loops compute, such as gathered ones.
      capacities: the bytes that a device of each group has; by default all have the same.
    """
    simulation = simulate(plan, costs, topology=topology)
    memories = memories_of(plan, arrivals, holding, updated)
    missing = [
        memory.peak_bytes - capacity
        for memory, capacity in zip(memories, capacities or (0.0,) * len(memories), strict=True)
    ]
    worst = max(range(len(memories)), key=lambda group: (missing[group], memories[group].peak_bytes))
    return Prediction(
        seconds=simulation.makespan,
        bubble=simulation.bubble,
        # A step that only hands on its arguments takes no time.
        communication=reducing / simulation.makespan if simulation.makespan else 0.0,
        memory=memory_of_group(plan, worst, memories[worst], updated, computed_weights),
        stage_seconds=stage_seconds(plan, costs),
        source=source,
    )


def memories_of(
    plan: Plan,
    arrivals: Mapping[tuple[tuple[int, int], int], EarliestArrival],
    holding: Holding,
    updated: Collection[Name],
) -> tuple[GroupMemory, ...]:
    """The memory of the devices of each group, if the messages of all edges are held in the same place."""
    edges = itertools.permutations(range(len(plan.programs)), 2)
    return group_memories(plan, arrivals, dict.fromkeys(edges, holding), updated)


def stage_seconds(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """The seconds of all tasks of each stage, for one microbatch with all its slices.

    Where groups share cores: the seconds while no other group computes.
    """
    cells = {
        types_of(run.task)
        for program in plan.programs
        for run in program.runs
        if not isinstance(run.task, OutsideTask)
    }
    alone = costs.times({member for types in cells for member in types})
    seconds_of: dict[TaskType, float] = {}
    for types in sorted(cells, key=len, reverse=True):  # the time of a task alone is known better
        seconds_of |= zip(types, costs.share(types, [alone[each] for each in types]), strict=True)
    numbers = range(1 + max((number for _, number in seconds_of), default=-1))
    of_stage = dict.fromkeys(map(plan.on_first_slice, numbers), 0.0)
    for (_, number), seconds in seconds_of.items():
        of_stage[plan.on_first_slice(number)] += seconds
    return tuple(of_stage.values())


def memory_of_group(
    plan: Plan,
    mpmd_idx: int,
    memory: GroupMemory,
    updated: Collection[Name],
    computed_weights: Collection[Name],
) -> Memory:
    """Divides a group's peak memory into its parts.

    Updated arguments that the loop reads count as weights; so do, while the loop runs, weights that are
    computed before the loop. The remaining updated arguments count as state, together with the rest of the
    values from the start of the step or from outside the loop.
    """
    peak, axes = memory.peak, plan.submesh(mpmd_idx)
    is_in_loop = memory.task is not None and not isinstance(memory.task, OutsideTask)
    sizes = sizes_on_devices(plan, mpmd_idx) if is_in_loop else {}
    computed = min(peak.outside, sum(sizes.get(name, 0) for name in computed_weights))
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
        weights=weights + computed,
        gradients=peak.accumulators,
        state=peak.parameters - weights + peak.arguments + peak.outside - computed,
        residuals=peak.activations,
        messages=peak.received + peak.messages,
        temporaries=peak.temporaries or 0,
    )
