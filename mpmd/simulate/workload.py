"""What the groups do in one step, as flat lists of numbers, and when they do it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import accumulate

from mpmd.simulate.costs import Costs, Edge


@dataclasses.dataclass
class Messages:
    """Messages between operations, as lists with an entry for each, by ascending sender.

    Attributes:
      edges: the edges that have messages, each with its number.
      edge_numbers: of a message, the number of its edge.
      nbytes: of a message, its size.
      senders: of a message, the operation at whose end it leaves.
      readers: of a message, the first operation that needs it; -1 if none does.
    """

    edges: dict[Edge, int] = dataclasses.field(default_factory=dict)
    edge_numbers: list[int] = dataclasses.field(default_factory=list)
    nbytes: list[float] = dataclasses.field(default_factory=list)
    senders: list[int] = dataclasses.field(default_factory=list)
    readers: list[int] = dataclasses.field(default_factory=list)

    def add(self, edge: Edge, nbytes: float, sender: int, reader: int) -> None:
        self.edge_numbers.append(self.edges.setdefault(edge, len(self.edges)))
        self.nbytes.append(nbytes)
        self.senders.append(sender)
        self.readers.append(reader)


@dataclasses.dataclass(frozen=True)
class Workload:
    """The operations of all groups in one step, numbered, and the messages between them.

    The operations of group ``g`` are ``range(bounds[g], bounds[g + 1])``, in the order of its program. What
    is known of them is in flat lists, so that a million tasks fit.

    Attributes:
      labels: of an operation, what prints as its name.
      durations: of an operation, how long it takes.
      at_start: of an operation, what is added to its group's memory when it starts.
      at_end: of an operation, what is added, in this order, when the group goes on to the next one.
      resident: of a group, its memory at the start of a step.
      hidden: operations that are no tasks and take no time.
    """

    costs: Costs
    bounds: list[int]
    labels: Sequence[object]
    durations: list[float]
    at_start: list[float]
    at_end: list[tuple[float, ...]]
    resident: list[float]
    messages: Messages
    hidden: frozenset[int] = frozenset()

    @property
    def mpmd_dim(self) -> int:
        return len(self.resident)

    def operations(self, mpmd_idx: int) -> range:
        """The operations of a group."""
        return range(self.bounds[mpmd_idx], self.bounds[mpmd_idx + 1])

    @functools.cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The edges that have messages, by number."""
        return tuple(self.messages.edges)

    def edge(self, message: int) -> Edge:
        """The edge that a message takes."""
        return self.edges[self.messages.edge_numbers[message]]

    @functools.cached_property
    def sends(self) -> list[int]:
        """The messages of operation ``i`` are ``range(sends[i], sends[i + 1])``."""
        counts = [0] * len(self.labels)
        for sender in self.messages.senders:
            counts[sender] += 1
        return list(accumulate(counts, initial=0))


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """When things happen in a step.

    Attributes:
      starts: of an operation, when it starts.
      arrivals: of a message, when it arrives.
      causes: of an operation, the message that it needs and that arrives last; -1 if it needs none.
      ends: of a group, when it is through with the step.
    """

    starts: list[float]
    arrivals: list[float]
    causes: list[int]
    ends: list[float]


def run(workload: Workload, steps: int) -> tuple[StepTimes, ...]:
    """Runs steps in a row, each operation as early as it can.

    An operation starts when its messages are there and its group is through with the operation before, be
    that one of the step before. Each group runs until it has to wait; the last message that it waits for
    puts it back into the queue. So the time this takes is linear in the operations and messages.

    Raises: ``ValueError`` when the groups get stuck, with what each waits for.
    """
    free = [0.0] * workload.mpmd_dim
    busy = [0.0] * len(workload.edges)
    times = []
    for _ in range(steps):
        times.append(_run_step(workload, free, busy))
        free = times[-1].ends
    return tuple(times)


def _run_step(workload: Workload, free: list[float], busy: list[float]) -> StepTimes:
    """Runs a step from when each group is free, and moves the times until which the edges are busy."""
    # Local names make the loop a good deal faster.
    bounds, durations, sends = workload.bounds, workload.durations, workload.sends
    readers, nbytes = workload.messages.readers, workload.messages.nbytes
    edge_numbers = workload.messages.edge_numbers
    blocking = workload.costs.blocking
    links = [workload.costs.link_of(edge) for edge in workload.edges]
    latencies, bandwidths = [link.latency for link in links], [link.bandwidth for link in links]
    receivers = [receiver for _, receiver in workload.edges]
    starts, arrivals = [0.0] * len(durations), [0.0] * len(readers)
    # The last entry is for messages that nobody reads, whose reader is -1.
    missing = [0] * (len(durations) + 1)
    available, causes = [0.0] * len(missing), [-1] * len(missing)
    for reader in readers:
        missing[reader] += 1
    ends, positions = list(free), bounds[:-1]
    ready = list(range(len(free)))
    while ready:
        group = ready.pop()
        time, operation, bound = ends[group], positions[group], bounds[group + 1]
        while operation < bound and not missing[operation]:
            start = max(time, available[operation])
            starts[operation] = start
            time = start + durations[operation]
            for message in range(sends[operation], sends[operation + 1]):
                edge, reader = edge_numbers[message], readers[message]
                busy[edge] = max(time, busy[edge]) + nbytes[message] / bandwidths[edge]
                arrivals[message] = arrival = busy[edge] + latencies[edge]
                if blocking:
                    time = arrival
                if arrival > available[reader]:
                    available[reader], causes[reader] = arrival, message
                missing[reader] -= 1
                receiver = receivers[edge]
                if not missing[reader] and positions[receiver] == reader:
                    ready.append(receiver)
            operation += 1
        ends[group], positions[group] = time, operation
    if positions != bounds[1:]:
        raise ValueError(_deadlock(workload, positions))
    return StepTimes(starts, arrivals, causes, ends)


def _deadlock(workload: Workload, positions: list[int]) -> str:
    """What each group waits for that has not run all its operations."""
    messages, waits = workload.messages, []
    for group, position in enumerate(positions):
        if position < workload.bounds[group + 1]:
            lacks = []
            for message, reader in enumerate(messages.readers):
                sender, (source, _) = messages.senders[message], workload.edge(message)
                if reader == position and sender >= positions[source]:
                    lacks.append(f"{workload.labels[sender]} (group {source})")
            waits.append(f"group {group} waits at {workload.labels[position]} for {', '.join(lacks)}")
    return f"the groups get stuck:\n  - deadlock: {'; '.join(waits)}"
