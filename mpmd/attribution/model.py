"""A simulation of a measured step, of which single things can be changed.

It has the measured time of each task, the handling before it, the begin of each group, and for each edge the
median time of its messages in flight. Rare slow messages are therefore in the causes of gaps, and not here.

Where groups share cores, the times of tasks and handling are those that each would take alone, and the
simulation has groups share the cores: what a group saves, others may use, and what runs at the same time as
others saves little.
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
from mpmd.attribution.links import Links
from mpmd.attribution.measured import Measured, type_of
from mpmd.ir.plan import Edge
from mpmd.simulate.costs import Costs, Link
from mpmd.simulate.sharing import run_sharing
from mpmd.simulate.workload import Instant, Workload, run


@dataclasses.dataclass(frozen=True)
class StepModel:
    """The times of a step, in nanoseconds.

    Attributes:
      durations: of the tasks, by operation.
      medians: of the type of each operation.
      equal: those of each operation if stages were equal, and outside work divided evenly.
      handling: before each operation.
      received, late_begin: of each group, until it had the request, and from then until it began.
      flights: of a message, by edge.
      reply: from the last reply to the return.
      at_once, loads: the number of groups that can compute at once, and as how many each counts, as of
        ``Measured``.
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
    at_once: float = math.inf
    loads: tuple[float, ...] = ()

    @staticmethod
    def of(attribution: Attribution) -> StepModel:
        """The times of a measured step."""
        measured, links = attribution.measured, attribution.links
        last = max(measured.ends[measured.final(group)] for group in measured.groups)
        received = [min(measured.received[group], measured.began(group)) for group in measured.groups]
        durations, handling = _times_alone(measured, links)
        medians = _medians_alone(measured, durations)
        return StepModel(
            attribution=attribution,
            durations=durations,
            medians=tuple(map(int, medians.durations)),
            equal=tuple(map(int, equal_durations(medians, measured.loops))),
            handling=handling,
            received=tuple(received),
            late_begin=tuple(measured.began(group) - received[group] for group in measured.groups),
            flights=flight_times(measured),
            reply=measured.returned - last,
            at_once=measured.at_once,
            loads=measured.loads,
        )

    @functools.cached_property
    def makespan(self) -> int:
        """The time from the call to the return."""
        workload = self.attribution.measured.workload
        durations: list[float] = [
            time + extra for time, extra in zip(self.durations, self.handling, strict=True)
        ]
        begins = [sum(times) for times in zip(self.received, self.late_begin, strict=True)]
        links = {edge: Link(latency=time) for edge, time in self.flights.items()}
        costs = Costs(links=links, at_once=self.at_once, loads=self.loads)
        changed = dataclasses.replace(workload, costs=costs, durations=durations)
        runs = run if math.isinf(self.at_once) else run_sharing
        (times,) = runs(changed, 1, begins)
        return round(max(times.ends, default=0)) + self.reply

    def with_durations(self, durations: Sequence[float]) -> StepModel:
        """The step with other times of tasks."""
        return dataclasses.replace(self, durations=tuple(map(round, durations)))

    def ideal(self) -> StepModel:
        """The step with equal stages, free messages, and nothing between tasks and before the first one."""
        nothing = (0,) * len(self.received)
        return dataclasses.replace(
            self,
            durations=self.equal,
            handling=(0,) * len(self.handling),
            received=nothing,
            late_begin=nothing,
            flights={},
            reply=0,
        )


def _times_alone(measured: Measured, links: Links) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The times of tasks, and of the handling before each, if no group shared its cores with others."""
    durations = [end - start for start, end in zip(measured.starts, measured.ends, strict=True)]
    handling = [link.handling for link in links.links]
    if math.isinf(measured.at_once):
        return tuple(durations), tuple(handling)
    begins = [start - time for start, time in zip(measured.starts, handling, strict=True)]
    loads = [
        measured.loads[group] if measured.loads else 1.0
        for group in measured.groups
        for _ in measured.operations(group)
    ]
    alone = times_alone(
        [*begins, *measured.starts], [*measured.starts, *measured.ends], measured.at_once, [*loads, *loads]
    )
    return tuple(alone[len(begins) :]), tuple(alone[: len(begins)])


def _medians_alone(measured: Measured, durations: Sequence[int]) -> Workload:
    """The workload with the medians of types, each in proportion to what its tasks here take alone."""
    workload = measured.workload
    if math.isinf(measured.at_once):
        return workload
    together: collections.Counter = collections.Counter()
    alone: collections.Counter = collections.Counter()
    keys = [
        None if isinstance(task := workload.tasks[operation], Instant) else type_of(group, task)
        for group in measured.groups
        for operation in measured.operations(group)
    ]
    for operation, key in enumerate(keys):
        together[key] += measured.duration(operation)
        alone[key] += durations[operation]
    medians: list[float] = [
        int(median) * alone[key] // together[key] if key and together[key] else median
        for key, median in zip(keys, workload.durations, strict=True)
    ]
    return dataclasses.replace(workload, durations=medians)


def flight_times(measured: Measured) -> dict[Edge, int]:
    """For each edge, the median time in flight of the messages that its receiver waited for when they left.

    A receiver that is busy may notice late that a message has come, which delays nothing. So of an edge
    without any message that was waited for, the shortest time counts.
    """
    workload = measured.workload
    times: dict[Edge, list[int]] = collections.defaultdict(list)
    awaited: dict[Edge, list[int]] = collections.defaultdict(list)
    for of_operation in measured.receipts:
        for receipt in of_operation:
            edge = workload.edge(receipt.message)
            sender = workload.messages.senders[receipt.message]
            sent = max(measured.ends[sender], measured.sent[receipt.message])
            flight = max(receipt.arrived - sent, 0)
            times[edge].append(flight)
            if receipt.start <= sent:
                awaited[edge].append(flight)
    return {
        edge: int(statistics.median(awaited[edge])) if awaited[edge] else min(times[edge])
        for edge in sorted(times)
    }
