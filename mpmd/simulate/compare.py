"""Ranks the families of schedules for a number of groups and microbatches, by simulating each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpmd.ir.plan import TaskKind
from mpmd.schedules import FAMILIES, ForwardOnly, Schedule, TaskTimes
from mpmd.simulate import Costs, Link, Simulation, simulate
from mpmd.validation import int_fault, int_faults, number_fault, raise_faults, sequence_fault, type_fault


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule and its simulation.

    Attributes:
      schedule: the schedule, of the size that is compared.
      simulation: the simulation of one step.
      period: the time from step to step if nothing makes the groups wait for one another in between.
      peak: the most memory that a group holds, in residuals of a microbatch of all the stages of a group.
    """

    schedule: Schedule
    simulation: Simulation
    period: float
    peak: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Schedules of one size.

    Attributes:
      candidates: the schedules that keep to the limit of memory. The shortest step comes first; of equally
        long ones, the one that needs the least memory, and then the one with the shortest period.
      over_limit: the schedules that exceed the limit, in the same order.
      refusals: why the other families have no schedule of this size, or none that keeps to the limit.
    """

    candidates: tuple[Candidate, ...]
    over_limit: tuple[Candidate, ...]
    refusals: tuple[str, ...]


def compare(
    mpmd_dim: int,
    num_microbatches: int,
    times: Mapping[TaskKind, float],
    latency: float = 0.0,
    memory_limit: float = math.inf,
    stages_per_group: Sequence[int] = (),
) -> Comparison:
    """Simulates one step of the same model under every schedule that has backwards.

    A model that is cut into twice as many stages has stages of half the time and half the memory.

    Args:
      mpmd_dim: the number of groups.
      num_microbatches: microbatches of the step.
      times: by kind of task, how long all stages of a group together take for a microbatch.
      latency: how long a message between groups takes.
      memory_limit: the most that a group may hold, in residuals of a microbatch of all the stages of a group.
        Schedules that have a ``memory_limit`` get it.
      stages_per_group: the numbers to try; by default each family's own.

    Raises: ``ValueError`` for a number that is not positive.
    """
    raise_faults(
        int_fault("mpmd_dim", mpmd_dim),
        int_fault("num_microbatches", num_microbatches),
        type_fault("times", times, Mapping, "a dict of the time of each kind of task"),
        number_fault("latency", latency, "a time", least=0),
        number_fault("memory_limit", memory_limit, above=0),
        sequence_fault("stages_per_group", stages_per_group, "a sequence of numbers to try"),
    )
    raise_faults(*int_faults("stages_per_group", stages_per_group))
    found, refusals = [], []
    for family in FAMILIES.values():
        if family.schedule is ForwardOnly:
            continue
        for number in stages_per_group or [family.stages_per_group]:
            costs = Costs(
                {kind: time / number for kind, time in times.items()}, link=Link(latency), atomic=True
            )
            try:
                schedule = with_costs(family.build(mpmd_dim, mpmd_dim * number), costs, memory_limit * number)
            except ValueError as error:
                refusals.append(str(error))
            else:
                found.append(_candidate(schedule, num_microbatches, costs))
    # Sums of the same times can differ in their last digits.
    found.sort(
        key=lambda candidate: (round(candidate.simulation.makespan, 9), candidate.peak, candidate.period)
    )
    within = [candidate for candidate in found if candidate.peak <= memory_limit]
    over = [candidate for candidate in found if candidate.peak > memory_limit]
    return Comparison(tuple(within), tuple(over), tuple(refusals))


def with_costs(schedule: Schedule, costs: Costs, memory_limit: float = math.inf) -> Schedule:
    """The schedule with these times and this limit, if it depends on times or on a limit of memory.

    Args:
      memory_limit: the most residuals of a microbatch of one stage that a group may hold.
    """
    fields = {field.name for field in dataclasses.fields(schedule)}
    changes: dict[str, Any] = {}
    if "times" in fields:
        kinds = costs.kinds
        changes["times"] = TaskTimes(
            kinds["fwd"], kinds["bwd"], kinds["bwdA"], kinds["bwdW"], hop=costs.link.latency
        )
    if "memory_limit" in fields and math.isfinite(memory_limit):
        changes["memory_limit"] = math.floor(memory_limit)
    return dataclasses.replace(schedule, **changes)


def _candidate(schedule: Schedule, num_microbatches: int, costs: Costs) -> Candidate:
    tasks = schedule.tasks(num_microbatches)
    simulation = simulate(tasks, costs)
    peak = max(simulation.peaks) * schedule.mpmd_dim / schedule.num_stages
    return Candidate(schedule, simulation, simulate(tasks, costs, steps=2).period, peak)
