"""All that follows from recorded steps and their plan, computed when it is first asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping

from mpmd.attribution.attribution import Attribution
from mpmd.attribution.clocks import MatchedStep, Senders, match
from mpmd.attribution.findings import Finding, findings_of
from mpmd.attribution.measured import measure
from mpmd.attribution.model import StepModel
from mpmd.attribution.scenarios import Scenario, scenarios_of
from mpmd.ir.plan import Edge, Plan
from mpmd.ir.process_times import RecordedStep
from mpmd.ir.routes import Routes, Topology


@dataclasses.dataclass(frozen=True, eq=False)
class Analysis:
    plan: Plan
    topology: Topology
    recorded: tuple[RecordedStep, ...]

    @functools.cached_property
    def steps(self) -> tuple[MatchedStep, ...]:
        senders = _senders(self.plan, self.topology)
        return tuple(match(step, senders) for step in self.recorded)

    @functools.cached_property
    def attribution(self) -> Attribution:
        return Attribution.of(measure(self.plan, self.steps, self.topology))

    @property
    def step(self) -> MatchedStep:
        """The step of median length, which is explained."""
        return self.steps[self.attribution.measured.step]

    @property
    def recoveries(self) -> Mapping[int, int]:
        """By the number of a step, the nanoseconds in which groups were replaced after its call."""
        times = ((number, step.recovery) for number, step in enumerate(self.steps))
        return {number: time for number, time in times if time is not None}

    @functools.cached_property
    def scenarios(self) -> tuple[Scenario, ...]:
        return scenarios_of(self._model)

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        return findings_of(self._model, self.scenarios)

    @functools.cached_property
    def _model(self) -> StepModel:
        return StepModel.of(self.attribution)


def _senders(plan: Plan, topology: Topology) -> Senders:
    if all(group.num_processes == 1 for group in topology.groups):
        return lambda edge, tag, rank: (0,)
    routes = Routes(plan, topology)
    of_group = functools.cache(routes.of_group)

    def senders(edge: Edge, tag: int, rank: int) -> Collection[int]:
        return of_group(edge[1])[*edge, tag].received_by(rank).keys()

    return senders
