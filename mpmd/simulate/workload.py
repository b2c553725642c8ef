"""The operations of all groups in one step, as flat lists of numbers, and when they run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from mpmd.ir.plan import AnyTask, Cell, Edge, LoopStages, with_slice
from mpmd.ir.slices import SliceNumbers
from mpmd.simulate.costs import Costs


@dataclasses.dataclass
class MessageTable:
    """Messages between operations, as lists with an entry for each message, by ascending sender.

    Attributes:
      edges: the number of each edge that has messages.
      edge_numbers: the number of the edge of each message.
      nbytes: the size of each message.
      senders: for each message, the operation that sends it when the operation ends.
      readers: for each message, the first operation that needs it.
    """

    edges: dict[Edge, int] = dataclasses.field(default_factory=dict)
    edge_numbers: list[int] = dataclasses.field(default_factory=list)
    nbytes: list[float] = dataclasses.field(default_factory=list)
    senders: list[int] = dataclasses.field(default_factory=list)
    readers: list[int] = dataclasses.field(default_factory=list)

    def add(self, edge: Edge, nbytes: float, sender: int, reader: int) -> None:
        """Adds a message; senders must not descend."""
        self.edge_numbers.append(self.edges.setdefault(edge, len(self.edges)))
        self.nbytes.append(nbytes)
        self.senders.append(sender)
        self.readers.append(reader)


@dataclasses.dataclass(frozen=True)
class Instant:
    """An operation that is no task and takes no time, such as the end of a step; prints as ``text``."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass
class Workload:
    """The operations of all groups in one step, numbered, and the messages between them.

    The operations of group ``g`` are ``range(bounds[g], bounds[g + 1])``, in the order of its program. Flat
    lists describe them, so that a million tasks fit.

    Attributes:
      tasks: the task or instant of each operation.
      durations: how long each operation takes.
      at_start: for each operation, the memory that its group gains when the operation starts.
      at_end: for each operation, the changes of memory, in order, when its group goes on to the next
        operation.
      resident: the memory of each group at the start of a step.
      arriving: for each message, the memory of its receiver that it takes until its reader starts; the
        reader's ``at_start`` includes the memory of the message's values. Empty if messages take no memory.
      numbers: the numbers of a schedule's stages on slices.
      loops: the loops of a plan.
    """

    costs: Costs
    bounds: list[int]
    tasks: Sequence[AnyTask | Instant]
    durations: list[float]
    at_start: list[float]
    at_end: list[tuple[float, ...]]
    resident: list[float]
    messages: MessageTable
    arriving: list[float] = dataclasses.field(default_factory=list)
    numbers: SliceNumbers | None = None
    loops: tuple[LoopStages, ...] = ()

    @property
    def mpmd_dim(self) -> int:
        return len(self.resident)

    def task_text(self, operation: int) -> str:
        task = self.tasks[operation]
        if not isinstance(task, Cell):
            return str(task)
        return self.numbers.task_text(task) if self.numbers else with_slice(str(task), task, self.loops)

    def operations(self, mpmd_idx: int) -> range:
        return range(self.bounds[mpmd_idx], self.bounds[mpmd_idx + 1])

    @functools.cached_property
    def edges(self) -> tuple[Edge, ...]:
        return tuple(self.messages.edges)

    def edge(self, message: int) -> Edge:
        return self.edges[self.messages.edge_numbers[message]]

    @functools.cached_property
    def received(self) -> list[list[int]]:
        """For each group, the received messages that take memory before an operation needs them."""
        received: list[list[int]] = [[] for _ in self.resident]
        for message, nbytes in enumerate(self.arriving):
            if nbytes:
                received[self.edge(message)[1]].append(message)
        return received

    @functools.cached_property
    def sends(self) -> list[int]:
        """The messages of operation ``i`` are ``range(sends[i], sends[i + 1])``."""
        counts = [0] * len(self.tasks)
        for sender in self.messages.senders:
            counts[sender] += 1
        return list(accumulate(counts, initial=0))


class DeadlockError(ValueError):
    """Groups wait for one another, or sends and receives do not match."""


Time = TypeVar("Time", float, int)
"""The type of times: numbers of any unit in simulations, whole nanoseconds in recorded steps."""


@dataclasses.dataclass(frozen=True)
class StepTimes(Generic[Time]):
    """The times of one step, simulated or recorded, as columns; a ``Workload`` numbers their rows.

    Attributes:
      starts: when each operation starts.
      durations: how long each operation takes.
      arrivals: when each message arrives.
      awaited: for each operation, the number of the message that arrives last before it starts; -1: none.
      group_ends: when each group ends the step.
    """

    starts: list[Time]
    durations: list[Time]
    arrivals: list[Time]
    awaited: list[int]
    group_ends: list[Time]

    def end(self, operation: int) -> Time:
        return self.starts[operation] + self.durations[operation]

    @property
    def makespan(self) -> Time:
        return max(self.group_ends, default=0)


def run(workload: Workload, steps: int, begins: Sequence[float] | None = None) -> tuple[StepTimes, ...]:
    """Runs steps in a row, each operation as early as possible.

    An operation starts when its messages have arrived and its group has ended the operation before, which may
    belong to the step before. Each group runs until it has to wait; the last message that it waits for puts
    the group back into the queue. So this takes time linear in the operations and messages.

    Args:
      begins: when each group begins; ``None``: at 0.

    Raises: ``DeadlockError``.
    """
    free = list(begins or [0.0] * workload.mpmd_dim)
    busy = [0.0] * len(workload.edges)
    times = []
    for _ in range(steps):
        times.append(_run_step(workload, free, busy))
        free = times[-1].group_ends
    return tuple(times)


def _run_step(workload: Workload, free: list[float], busy: list[float]) -> StepTimes:
    """Runs one step from the times at which groups and edges are free.

    Args:
      free: when each group can start.
      busy: until when each edge is busy; updated.
    """
    # Local names make the loop much faster.
    bounds, durations, sends = workload.bounds, workload.durations, workload.sends
    readers, nbytes = workload.messages.readers, workload.messages.nbytes
    edge_numbers = workload.messages.edge_numbers
    blocking = workload.costs.blocking
    links = [workload.costs.link_of(edge) for edge in workload.edges]
    latencies, bandwidths = [link.latency for link in links], [link.bandwidth for link in links]
    receivers = [receiver for _, receiver in workload.edges]
    starts, arrivals = [0.0] * len(durations), [0.0] * len(readers)
    missing = [0] * len(durations)
    available, awaited = [0.0] * len(missing), [-1] * len(missing)
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
                    available[reader], awaited[reader] = arrival, message
                missing[reader] -= 1
                receiver = receivers[edge]
                if not missing[reader] and positions[receiver] == reader:
                    ready.append(receiver)
            operation += 1
        ends[group], positions[group] = time, operation
    if positions != bounds[1:]:
        raise DeadlockError
    return StepTimes(starts, durations, arrivals, awaited, ends)
