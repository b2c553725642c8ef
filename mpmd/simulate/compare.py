"""Ranks the families of schedules for a number of groups and microbatches, by simulating each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpmd.ir.plan import TaskKind
from mpmd.schedules import (
    ALL_FAMILIES,
    FAMILIES,
    Family,
    ForwardOnly,
    Schedule,
    Seq1F1B,
    TaskTimes,
)
from mpmd.simulate import Costs, Link, Simulation, simulate
from mpmd.validation import int_faults, number_fault, raise_faults, sequence_fault, size_fault, type_fault


@dataclasses.dataclass(frozen=True)
class SimulatedSchedule:
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

    @property
    def name(self) -> str:
        split = ", split" if isinstance(self.schedule, Seq1F1B) and self.schedule.split_backward else ""
        slices = f" of {self.schedule.slices} slices" if self.schedule.slices > 1 else ""
        return f"{self.schedule.name}{slices}{split}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Schedules of one size.

    Attributes:
      candidates: the schedules within the limit of memory, in ascending order of their makespan, then of
        their memory, then of their period.
      over_limit: the schedules that exceed the limit, in the same order.
      refusals: for each family without a schedule of this size and limit, the reason.
    """

    candidates: tuple[SimulatedSchedule, ...]
    over_limit: tuple[SimulatedSchedule, ...]
    refusals: tuple[str, ...]


def compare(
    mpmd_dim: int,
    num_microbatches: int,
    times: Mapping[TaskKind, float],
    latency: float = 0.0,
    memory_limit: float = math.inf,
    stages_per_group: Sequence[int] = (),
    slices: int = 1,
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
      stages_per_group: the numbers of stages of a group to try; by default ``Family.stages_per_group``.
      slices: the number of slices of equal work that schedules of slices cut each microbatch into. 1: the
        comparison has no schedules of slices.

    Raises: ``ValueError`` for a number that is not positive.
    """
    raise_faults(
        size_fault("mpmd_dim", mpmd_dim),
        size_fault("num_microbatches", num_microbatches),
        type_fault("times", times, Mapping, "a dict of the time of each kind of task"),
        number_fault("latency", latency, "a time", least=0),
        number_fault("memory_limit", memory_limit, above=0),
        sequence_fault("stages_per_group", stages_per_group, "a sequence of numbers to try"),
        size_fault("slices", slices),
    )
    raise_faults(*int_faults("stages_per_group", stages_per_group))
    candidates: list[SimulatedSchedule] = []
    refusals: list[str] = []
    for family, number, cuts in _sizes(stages_per_group, slices):
        parts = number * cuts
        costs = Costs({kind: time / parts for kind, time in times.items()}, link=Link(latency), atomic=True)
        try:
            built = family.build(mpmd_dim, mpmd_dim * number, cuts)
            schedules = [with_costs(each, costs, memory_limit * parts) for each in _kinds_of(built)]
        except ValueError as error:
            refusals.append(str(error))
        else:
            candidates += [_candidate(schedule, num_microbatches, costs) for schedule in schedules]
    # Sums of the same times can differ in their last digits.
    candidates.sort(
        key=lambda candidate: (round(candidate.simulation.makespan, 9), candidate.peak, candidate.period)
    )
    within = [candidate for candidate in candidates if candidate.peak <= memory_limit]
    over = [candidate for candidate in candidates if candidate.peak > memory_limit]
    return Comparison(tuple(within), tuple(over), tuple(refusals))


def _sizes(stages_per_group: Sequence[int], slices: int) -> Iterator[tuple[Family, int, int]]:
    """The families with backwards, with each number of stages of a group and of slices to try."""
    for family in FAMILIES.values():
        if family.schedule is not ForwardOnly:
            yield from ((family, number, 1) for number in stages_per_group or [family.stages_per_group])
    for family in ALL_FAMILIES.values() if slices > 1 else ():
        if family.has_slices:
            own = [1, 2] if family.schedule is Seq1F1B else [family.stages_per_group]
            yield from ((family, number, slices) for number in stages_per_group or own)


def _kinds_of(schedule: Schedule) -> list[Schedule]:
    if isinstance(schedule, Seq1F1B):
        return [dataclasses.replace(schedule, split_backward=split) for split in (False, True)]
    return [schedule]


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


def _candidate(schedule: Schedule, num_microbatches: int, costs: Costs) -> SimulatedSchedule:
    tasks = schedule.tasks(num_microbatches)
    slices = schedule.slices
    simulation = simulate(tasks, costs, slices=slices)
    peak = max(simulation.peaks) * schedule.mpmd_dim / (schedule.num_stages * slices)
    return SimulatedSchedule(
        schedule, simulation, simulate(tasks, costs, steps=2, slices=slices).period, peak
    )
