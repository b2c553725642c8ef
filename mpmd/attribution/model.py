"""A simulation of a measured step, in which scenarios change single parts.

The model has the measured time of each task, the handling before it, the begin of each group, and for each
edge the median time of its messages in flight. Rare slow messages are in the causes of gaps, and not here.

Where groups share cores, the model has the times that tasks and handling would take alone, and simulates
groups that share the cores: a group that becomes faster leaves its cores to other groups.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence

from mpmd.attribution.attribution import Attribution
from mpmd.attribution.cores import times_alone
from mpmd.attribution.ideal import equal_durations
from mpmd.attribution.measured import Measured, types_of_operations
from mpmd.ir.plan import Edge
from mpmd.simulate.costs import Costs, Link
from mpmd.simulate.sharing import run_sharing
from mpmd.simulate.workload import Workload, run
from mpmd.util.grouping import grouped


@dataclasses.dataclass(frozen=True)
class StepModel:
    """The parts of a measured step's time, in nanoseconds.

    Attributes:
      durations: of the task of each operation.
      medians: of the type of each operation.
      equal: of each operation, if stages were equal and outside work divided evenly.
      handling: before each operation.
      received: of each group, until it had the request.
      late_begin: of each group, from then until it had the step's arguments.
      flights: of a message, by edge.
      reply: from the last reply to the return.
      at_once: the number of groups that can compute at once.
    """

    attribution: Attribution
    durations: tuple[int, ...]
    medians: tuple[int, ...]
    equal: tuple[int, ...]
    handling: tuple[int, ...]
    received: tuple[int, ...]
    late_begin: tuple[int, ...]
    flights: Mapping[Edge, int]
    reply: int
    at_once: float

    @staticmethod
    def of(attribution: Attribution) -> StepModel:
        measured = attribution.measured
        firsts = [attribution.links[first] for first in measured.workload.bounds[:-1]]
        durations, handling = _times_alone(attribution)
        medians = _medians_alone(measured, durations)
        return StepModel(
            attribution=attribution,
            durations=durations,
            medians=tuple(map(int, medians.durations)),
            equal=tuple(map(int, equal_durations(medians, measured.loops))),
            handling=handling,
            received=tuple(link.driver for link in firsts),
            late_begin=tuple(link.late_begin for link in firsts),
            flights=flight_times(measured),
            reply=measured.returned - measured.makespan,
            at_once=measured.at_once,
        )

    @functools.cached_property
    def makespan(self) -> int:
        measured = self.attribution.measured
        durations: list[float] = [
            time + extra for time, extra in zip(self.durations, self.handling, strict=True)
        ]
        begins = [sum(times) for times in zip(self.received, self.late_begin, strict=True)]
        links = {edge: Link(latency=time) for edge, time in self.flights.items()}
        costs = Costs(links=links, at_once=self.at_once)
        changed = dataclasses.replace(measured.workload, costs=costs, durations=durations)
        runs = run if math.isinf(self.at_once) else run_sharing
        (times,) = runs(changed, 1, begins)
        return round(times.makespan) + self.reply

    def with_durations(self, durations: Sequence[float]) -> StepModel:
        return dataclasses.replace(self, durations=tuple(map(round, durations)))


def _times_alone(attribution: Attribution) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the times of tasks, and of the handling before each, if each group had its own cores."""
    measured = attribution.measured
    handling = [link.handling for link in attribution.links]
    if math.isinf(measured.at_once):
        return tuple(measured.durations), tuple(handling)
    begins = [start - time for start, time in zip(measured.starts, handling, strict=True)]
    ends = map(measured.end, range(len(begins)))
    alone = times_alone([*begins, *measured.starts], [*measured.starts, *ends], measured.at_once)
    return tuple(alone[len(begins) :]), tuple(alone[: len(begins)])


def _medians_alone(measured: Measured, durations: Sequence[int]) -> Workload:
    """Scales the median of each type by the times that its tasks take without shared cores."""
    if math.isinf(measured.at_once):
        return measured.workload
    together: collections.Counter = collections.Counter()
    alone: collections.Counter = collections.Counter()
    keys = types_of_operations(measured.workload)
    for operation, key in enumerate(keys):
        together[key] += measured.durations[operation]
        alone[key] += durations[operation]
    medians: list[float] = [
        int(median) * alone[key] // together[key] if key and together[key] else median
        for key, median in zip(keys, measured.workload.durations, strict=True)
    ]
    return dataclasses.replace(measured.workload, durations=medians)


def flight_times(measured: Measured) -> dict[Edge, int]:
    """For each edge, the median time in flight of the messages that its receiver waited for when they left.

    A receiver that is busy may notice late that a message has come, which delays nothing. So of an edge
    without any message that was waited for, the shortest time counts.
    """
    senders = enumerate(measured.workload.messages.senders)
    left = [max(measured.end(sender), measured.sent[message]) for message, sender in senders]
    flights = [max(arrival - time, 0) for arrival, time in zip(measured.arrivals, left, strict=True)]
    times = {}
    for edge, messages in sorted(grouped((measured.workload.edge(i), i) for i in range(len(left))).items()):
        awaited = [flights[i] for i in messages if measured.asked[i] <= left[i]]
        times[edge] = int(statistics.median(awaited)) if awaited else min(flights[i] for i in messages)
    return times
