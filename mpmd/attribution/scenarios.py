"""The length of a measured step if single things were otherwise, by simulation."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import statistics
import types
from collections.abc import Iterator, Mapping

from mpmd.attribution.model import StepModel
from mpmd.ir.plan import Cell, Edge, OutsideTask

MOST_LINKS = 16
"""The links of which each is changed alone: those whose messages take the longest in all."""

OWN_CORES = "cores for all groups"

EQUAL_STAGES = "equal stages"

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
    return f"link {edge[0]} to {edge[1]} twice as fast"


def like_others(edge: Edge) -> str:
    return f"link {edge[0]} to {edge[1]} like the others"


def scenarios_of(model: StepModel) -> tuple[Scenario, ...]:
    """The scenarios of a step; the first one changes nothing."""
    return tuple(
        Scenario(name, cause, text, changed.makespan, model.makespan - changed.makespan)
        for name, cause, text, changed in _changes(model)
    )


def _changes(model: StepModel) -> Iterator[tuple[str, str, str, StepModel]]:
    change = functools.partial(dataclasses.replace, model)
    no_groups = (0,) * len(model.received)
    yield "measured", "", "nothing changed", model
    yield "links twice as fast", "message", "each message takes half as long", with_links(model, 0.5)
    slowest = slowest_links(model)
    for edge in slowest:
        yield twice_as_fast(edge), "message", "its messages take half as long", with_links(model, 0.5, edge)
    for edge in slowest:
        median = median_of_others(model.flights, edge)
        if median is not None and model.flights[edge] > STRAGGLING * median:
            text = "its messages take the median of the other links"
            yield like_others(edge), "message", text, change(flights={**model.flights, edge: median})
    yield "messages free", "message", "messages take no time", with_links(model, 0.0)
    yield EQUAL_STAGES, "imbalance", "each task takes the mean of all stages", with_equal(model, Cell)
    divided = "work outside loops takes the mean of all groups"
    yield "outside work divided", "outside", divided, with_equal(model, OutsideTask)
    medians = model.with_durations(model.medians)
    yield "no jitter", "jitter", "each task takes the median of its type", medians
    no_handling = (0,) * len(model.handling)
    yield "no handling", "handling", "nothing between tasks takes time", change(handling=no_handling)
    prompt = change(late_begin=no_groups)
    yield "arguments at once", "late_begin", "groups begin when they have the request", prompt
    on_time = change(received=no_groups, reply=0)
    yield "no driver", "driver", "requests and replies take no time", on_time
    begin = change(received=no_groups, late_begin=no_groups)
    yield "all begin at once", "", "all groups begin with the call", begin
    if not math.isinf(model.at_once):
        yield OWN_CORES, "cores", "groups share no cores", change(at_once=math.inf)
    ideal = dataclasses.replace(begin, durations=model.equal, handling=no_handling, flights={}, reply=0)
    yield "ideal", "", "all of these, on the same cores", ideal


def with_links(model: StepModel, factor: float, edge: Edge | None = None) -> StepModel:
    flights = model.flights.items()
    changed = {each: round(time * factor) if edge in (None, each) else time for each, time in flights}
    return dataclasses.replace(model, flights=changed)


def slowest_links(model: StepModel) -> list[Edge]:
    workload = model.attribution.measured.workload
    counts = collections.Counter(map(workload.edge, range(len(workload.messages.readers))))
    flights = model.flights
    slowest = sorted(filter(flights.get, flights), key=lambda edge: -flights[edge] * counts[edge])
    return sorted(slowest[:MOST_LINKS])


def median_of_others(flights: Mapping[Edge, int], edge: Edge) -> int | None:
    others = [time for each, time in flights.items() if each != edge]
    return int(statistics.median(others)) if others else None


def with_equal(model: StepModel, kind: type | types.UnionType) -> StepModel:
    """The step with tasks of a kind that take the mean of all stages or groups instead of their median.

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
