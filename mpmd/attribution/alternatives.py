"""Other schedules, and other numbers of microbatches, for a measured step's times, by simulation.

The loop of the step is simulated by its own order and by others, with the same times of tasks and messages;
the step is shorter by the difference. Where the number of stages is the same, each stage has its times;
otherwise the model is cut into equal stages. An order that places unequal stages better saves no more than
it would with equal ones: the rest is what equal stages save by any order. A kind that the step does not have
takes its part of a backward: ``bwdA`` and ``bwdW`` a half each.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

from mpmd.attribution.ideal import members_alone
from mpmd.attribution.model import StepModel
from mpmd.attribution.residuals import residual_bytes
from mpmd.ir.plan import Cell, Plan, TaskKind, TaskType
from mpmd.schedules import FAMILIES, Family, ForwardOnly, Schedule
from mpmd.simulate import Costs, Link, Simulation, simulate
from mpmd.simulate.compare import with_costs
from mpmd.simulate.costs import types_of

MOST_TASKS = 20_000
"""The tasks of a step up to which others are simulated: each of a dozen schedules takes as long."""


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A step with another schedule or another number of microbatches.

    Attributes:
      schedule: the name of the schedule.
      makespan: the nanoseconds from the call to the return.
      saves: the nanoseconds by which the simulated step is shorter.
      extra_bytes: those that the devices of the group with the most residuals hold more, at the peak;
        ``None`` where forwards and backwards run as one, so that nothing is known of residuals.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    makespan: int
    saves: int
    extra_bytes: int | None


def alternatives_of(model: StepModel, plan: Plan) -> tuple[Alternative, ...]:
    """The alternatives, shortest step first; none for several loops or more than ``MOST_TASKS``.

    A loop over slices has none: the times of its tasks without slices are not known. Of families that come
    to the same here, the first one is named.
    """
    if plan.names_stages or len(model.attribution.measured.workload.tasks) > MOST_TASKS:
        return ()
    loop = _Loop.of(model, plan)
    if loop is None:
        return ()
    different: dict[tuple[int | None, ...], Alternative] = {}
    for each in loop.alternatives():
        size = each.num_stages, each.num_microbatches, each.makespan, each.extra_bytes
        different.setdefault(size, each)
    return tuple(sorted(different.values(), key=lambda alternative: alternative.makespan))


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The loop of a step.

    Attributes:
      lists: the cells of each group.
      times: of each type of task, in nanoseconds, without the handling before it.
      fused: of each fused cell, with the handling.
      handling: before a task.
      schedule: the name; "" if it is not known.
      residuals: the bytes that a microbatch of all stages leaves for the backwards; ``None``: unknown.
    """

    model: StepModel
    lists: Sequence[Sequence[Cell]]
    times: Mapping[TaskType, float]
    fused: Mapping[tuple[TaskType, ...], float]
    handling: float
    num_stages: int
    num_microbatches: int
    schedule: str
    residuals: int | None

    @staticmethod
    def of(model: StepModel, plan: Plan) -> _Loop | None:
        """The loop; ``None`` without one, or if it has no backward."""
        measured = model.attribution.measured
        workload = measured.workload
        lists: list[list[Cell]] = [[] for _ in measured.groups]
        medians: dict[tuple[TaskType, ...], int] = {}
        handling: list[int] = []
        for group in measured.groups:
            for operation in measured.tasks(group):
                task = workload.tasks[operation]
                if isinstance(task, Cell):
                    lists[group].append(task)
                    medians[types_of(task)] = model.medians[operation]
                    handling.append(model.handling[operation])
        alone = members_alone(medians)
        if not any(kind != "fwd" for kind, _ in alone):
            return None
        between = statistics.median(handling)
        tasks = [task for cells in lists for cell in cells for task in cell.tasks]
        num_stages = 1 + max(task.stage for task in tasks)
        of_stages = residual_bytes(plan).values()
        return _Loop(
            model=model,
            lists=lists,
            times=alone,
            fused={types: time + between for types, time in medians.items() if len(types) > 1},
            handling=between,
            num_stages=num_stages,
            num_microbatches=1 + max(task.microbatch for task in tasks),
            schedule=plan.loops[0].schedule if plan.loops else "",
            residuals=round(statistics.fmean(of_stages) * num_stages) if of_stages else None,
        )

    def alternatives(self) -> Iterator[Alternative]:
        """The step by all families of schedules, and with half and twice the microbatches."""
        measured, equal = self._base(are_equal=False), self._base(are_equal=True)
        own, count = self.num_stages, self.num_microbatches
        for family in FAMILIES.values():
            if family.schedule is ForwardOnly or family.name == self.schedule:
                continue
            numbers = {family.stages_per_group * len(self.lists)}
            # With one stage for each group, families of several are one of the others.
            for number in sorted(numbers | {own} if own > len(self.lists) else numbers):
                if simulated := self._simulated(family, number, count):
                    base = measured if number == own else equal
                    alternative = self._alternative(*simulated, count, base)
                    if number == own and (even := self._simulated(family, own, count, are_equal=True)):
                        alternative = _at_most(alternative, self._alternative(*even, count, equal).saves)
                    yield alternative
        if self.schedule in FAMILIES:
            same = FAMILIES[self.schedule]
            for other in (count // 2, 2 * count):
                before = self._simulated(same, own, count)
                after = self._simulated(same, own, other) if other else None
                if before and after:
                    yield self._alternative(*after, other, before[1])

    def _base(self, are_equal: bool) -> Simulation:
        """The loop by its own order, with the times of its stages or with their means."""
        costs = self._costs(self.num_stages)
        if are_equal:
            return simulate(self.lists, dataclasses.replace(costs, tasks={}))
        return simulate(self.lists, dataclasses.replace(costs, fused=self.fused))

    def _simulated(
        self, family: Family, num_stages: int, count: int, are_equal: bool = False
    ) -> tuple[Schedule, Simulation] | None:
        """A schedule and its simulation; ``None`` for a size that the family does not have."""
        costs = self._costs(num_stages, scale=self.num_microbatches / count)
        if are_equal:
            costs = dataclasses.replace(costs, tasks={})
        try:
            schedule = with_costs(family.build(len(self.lists), num_stages), costs)
            return schedule, simulate(schedule.tasks(count), costs)
        except ValueError:
            return None

    def _alternative(
        self, schedule: Schedule, simulation: Simulation, count: int, base: Simulation
    ) -> Alternative:
        saves = round(base.makespan - simulation.makespan)
        extra = None
        if self.residuals is not None:
            scale = self.num_microbatches / count
            peak = max(simulation.peaks) * scale / schedule.num_stages
            extra = round((peak - max(base.peaks) / self.num_stages) * self.residuals)
        makespan = self.model.makespan - saves
        return Alternative(schedule.name, schedule.num_stages, count, makespan, saves, extra)

    def _costs(self, num_stages: int, scale: float = 1.0) -> Costs:
        """The costs of a loop of that many stages, whose microbatches are ``scale`` times as large."""
        part = scale * self.num_stages / num_stages
        tasks = {member: time * part + self.handling for member, time in _split(self.times).items()}
        by_kind: dict[TaskKind, list[float]] = collections.defaultdict(list)
        for (kind, _), time in tasks.items():
            by_kind[kind].append(time)
        flights = self.model.flights
        return Costs(
            kinds={kind: statistics.fmean(times) for kind, times in by_kind.items()},
            tasks=tasks if num_stages == self.num_stages else {},
            link=Link(latency=statistics.median(flights.values()) if flights else 0.0),
            links={edge: Link(latency=time) for edge, time in flights.items()},
            atomic=True,
            at_once=self.model.at_once,
            loads=self.model.loads,
        )


def _at_most(alternative: Alternative, saves: int) -> Alternative:
    """The alternative if it saves no more than that."""
    less = max(alternative.saves - saves, 0)
    return dataclasses.replace(
        alternative, makespan=alternative.makespan + less, saves=alternative.saves - less
    )


def _split(times: Mapping[TaskType, float]) -> dict[TaskType, float]:
    """The times of whole and split backwards, of which the loop has one, without handling."""
    split = dict(times)
    for (kind, stage), time in times.items():
        if kind == "bwd":
            split.setdefault(TaskType("bwdA", stage), time / 2)
            split.setdefault(TaskType("bwdW", stage), time / 2)
        elif kind in ("bwdA", "bwdW"):
            parts = [times.get(TaskType(part, stage), 0.0) for part in ("bwdA", "bwdW")]
            split.setdefault(TaskType("bwd", stage), sum(parts))
    return split
