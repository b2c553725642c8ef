"""A simulation of a measured step, of which single things can be changed.

It has the measured time of each task, the handling before it, the begin of each group, and for each edge the
median time of its messages in flight. Rare slow messages are therefore in the causes of gaps, and not here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence

from mpmd.attribution.attribution import Attribution
from mpmd.ir.plan import Edge
from mpmd.simulate.costs import Costs, Link
from mpmd.simulate.workload import run

NOTICED = 0.1
"""The part of a message's flight up to which a wait for it may be a late notice that it has come."""


@dataclasses.dataclass(frozen=True)
class StepModel:
    """The times of a step, in nanoseconds.

    Attributes:
      durations: of the tasks, by operation.
      handling: before each operation.
      received, late_begin: of each group, until it had the request, and from then until it began.
      flights: of a message, by edge.
      reply: from the last reply to the return.
    """

    attribution: Attribution
    durations: tuple[int, ...]
    handling: tuple[int, ...]
    received: tuple[int, ...]
    late_begin: tuple[int, ...]
    flights: Mapping[Edge, int]
    reply: int

    @staticmethod
    def of(attribution: Attribution) -> StepModel:
        """The times of a measured step."""
        measured, links = attribution.measured, attribution.links
        last = max(measured.ends[measured.final(group)] for group in measured.groups)
        received = [min(measured.received[group], measured.began(group)) for group in measured.groups]
        return StepModel(
            attribution=attribution,
            durations=tuple(end - start for start, end in zip(measured.starts, measured.ends, strict=True)),
            handling=tuple(link.handling for link in links.links),
            received=tuple(received),
            late_begin=tuple(measured.began(group) - received[group] for group in measured.groups),
            flights=flight_times(attribution),
            reply=measured.returned - last,
        )

    @functools.cached_property
    def makespan(self) -> int:
        """The time from the call to the return."""
        workload = self.attribution.measured.workload
        durations: list[float] = [
            time + extra for time, extra in zip(self.durations, self.handling, strict=True)
        ]
        for group, first in enumerate(workload.bounds[:-1]):
            durations[first] += self.received[group] + self.late_begin[group]
        costs = Costs(links={edge: Link(latency=time) for edge, time in self.flights.items()})
        (times,) = run(dataclasses.replace(workload, costs=costs, durations=durations), 1)
        return round(max(times.ends, default=0)) + self.reply

    def with_durations(self, durations: Sequence[float]) -> StepModel:
        """The step with other times of tasks."""
        return dataclasses.replace(self, durations=tuple(map(round, durations)))


def flight_times(attribution: Attribution) -> dict[Edge, int]:
    """For each edge, the median time in flight of messages that its receiver waited for, or else the least.

    A receiver that computes may notice only when it next waits that a message has come, which delays nothing.
    So a wait that is short beside the flight says nothing of the flight.
    """
    measured = attribution.measured
    workload = measured.workload
    times: dict[Edge, list[int]] = collections.defaultdict(list)
    awaited: dict[Edge, list[int]] = collections.defaultdict(list)
    for of_operation in measured.receipts:
        for receipt in of_operation:
            edge = workload.edge(receipt.message)
            sender = workload.messages.senders[receipt.message]
            left = max(measured.ends[sender], measured.sent[receipt.message])
            flight = max(receipt.arrived - left, 0)
            times[edge].append(flight)
            if receipt.arrived > receipt.start + NOTICED * flight:
                awaited[edge].append(flight)
    return {edge: int(statistics.median(awaited[edge] or [min(times[edge])])) for edge in sorted(times)}
