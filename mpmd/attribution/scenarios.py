"""The length of a measured step if single things were otherwise, by simulation."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import types
from collections.abc import Iterator

from mpmd.attribution.model import StepModel
from mpmd.ir.plan import Cell, Edge, OutsideTask

MOST_LINKS = 16
"""The links of which each is changed alone: those whose messages take the longest in all."""

OWN_CORES = "cores for all groups"
"""The name of the scenario of a step whose groups share cores, without that."""

EQUAL_STAGES = "equal stages"
"""The name of the scenario in which each task takes the mean of all stages."""

STRAGGLING = 2
"""A link is slow whose messages take more than this times the median of the other links."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A step in which something is otherwise.

    Attributes:
      name: of the scenario, unique in a profile.
      cause: of the idle time that it takes away, as in ``Causes``; ``"cores"`` for shared ones; "" for
        several.
      text: the change, in words.
      makespan: the nanoseconds from the call to the return.
      saves: the nanoseconds by which that is shorter than the simulated step with nothing changed.
    """

    name: str
    cause: str
    text: str
    makespan: int
    saves: int


def twice_as_fast(edge: Edge) -> str:
    """The name of the scenario of a faster link."""
    return f"link {edge[0]} to {edge[1]} twice as fast"


def like_others(edge: Edge) -> str:
    """The name of the scenario of a slow link that is as fast as the other links."""
    return f"link {edge[0]} to {edge[1]} like the others"


def scenarios_of(model: StepModel) -> tuple[Scenario, ...]:
    """The scenarios of a step; the first one changes nothing."""
    return tuple(_Scenarios(model).all())


@dataclasses.dataclass(frozen=True)
class _Scenarios:
    model: StepModel

    def all(self) -> Iterator[Scenario]:
        model = self.model
        yield self._of("measured", "", "nothing changed", model)
        yield self._of("links twice as fast", "message", "each message takes half as long", self._links(0.5))
        for edge in self._slowest_links():
            halved = self._links(0.5, edge)
            yield self._of(twice_as_fast(edge), "message", "its messages take half as long", halved)
        for edge, time in self._stragglers():
            changed = dataclasses.replace(model, flights={**model.flights, edge: time})
            text = "its messages take the median of the other links"
            yield self._of(like_others(edge), "message", text, changed)
        yield self._of("messages free", "message", "messages take no time", self._links(0.0))
        yield self._of(
            EQUAL_STAGES, "imbalance", "each task takes the mean of all stages", with_equal_stages(model)
        )
        yield self._of(
            "outside work divided",
            "outside",
            "work outside loops takes the mean of all groups",
            with_outside_divided(model),
        )
        medians = model.with_durations(model.medians)
        yield self._of("no jitter", "jitter", "each task takes the median of its type", medians)
        no_handling = dataclasses.replace(model, handling=(0,) * len(model.handling))
        yield self._of("no handling", "handling", "nothing between tasks takes time", no_handling)
        nothing = (0,) * len(model.received)
        prompt = dataclasses.replace(model, late_begin=nothing)
        yield self._of("arguments at once", "late_begin", "groups begin when they have the request", prompt)
        on_time = dataclasses.replace(model, received=nothing, reply=0)
        yield self._of("no driver", "driver", "requests and replies take no time", on_time)
        begin = dataclasses.replace(model, received=nothing, late_begin=nothing)
        yield self._of("all begin at once", "", "all groups begin with the call", begin)
        if not math.isinf(model.at_once):
            apart = dataclasses.replace(model, at_once=math.inf)
            yield self._of(OWN_CORES, "cores", "groups share no cores", apart)
        yield self._of("ideal", "", "all of these, on the same cores", model.ideal())

    def _of(self, name: str, cause: str, text: str, changed: StepModel) -> Scenario:
        return Scenario(name, cause, text, changed.makespan, self.model.makespan - changed.makespan)

    def _links(self, factor: float, edge: Edge | None = None) -> StepModel:
        """The step with messages that take ``factor`` of their time, on all edges or one."""
        flights = self.model.flights.items()
        changed = {each: round(time * factor) if edge in (None, each) else time for each, time in flights}
        return dataclasses.replace(self.model, flights=changed)

    def _slowest_links(self) -> list[Edge]:
        workload = self.model.attribution.measured.workload
        counts = collections.Counter(map(workload.edge, range(len(workload.messages.readers))))
        flights = self.model.flights
        slowest = sorted(filter(flights.get, flights), key=lambda edge: -flights[edge] * counts[edge])
        return sorted(slowest[:MOST_LINKS])

    def _stragglers(self) -> Iterator[tuple[Edge, int]]:
        """The slow links, each with the median time of the messages of the others."""
        for edge in self._slowest_links():
            others = [time for each, time in self.model.flights.items() if each != edge]
            if others and self.model.flights[edge] > STRAGGLING * (median := int(statistics.median(others))):
                yield edge, median


def with_equal_stages(model: StepModel) -> StepModel:
    """The step with tasks of loops that take the mean of all stages."""
    return _with_means(model, Cell)


def with_outside_divided(model: StepModel) -> StepModel:
    """The step with work outside of loops that takes the mean of all groups."""
    return _with_means(model, OutsideTask)


def _with_means(model: StepModel, kind: type | types.UnionType) -> StepModel:
    """The step with tasks of a kind that take the mean instead of their median.

    Each stays as much above or below it as it was: a disturbance is not larger where there is more work.
    """
    tasks = model.attribution.measured.workload.tasks
    return model.with_durations(
        [
            max(time - median + equal, 0) if isinstance(task, kind) else time
            for time, equal, median, task in zip(
                model.durations, model.equal, model.medians, tasks, strict=True
            )
        ]
    )
