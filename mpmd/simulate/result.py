"""The result of a simulation: the times of tasks, the reasons of idle times, and memory."""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import operator
from collections.abc import Iterator

from mpmd.ir.events import Event
from mpmd.simulate.waits import awaited_message
from mpmd.simulate.workload import Instant, StepTimes, Workload


@dataclasses.dataclass(frozen=True)
class Gap:
    """A span in which a group is idle, and the reason: it waits, sends, or has nothing left to do."""

    mpmd_idx: int
    start: float
    end: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The simulated times, in the costs' unit of time; the first step starts at 0.

    The events and gaps of a group fill the time from 0 to ``makespan``.

    Attributes:
      mpmd_dim: the number of groups.
      makespan: when the last group ends the last step.
      period: the time between the ends of the last two steps; of a single step, its makespan.
      workload: the operations and messages of a step.
      times: the times of the operations and messages, for each step.
    """

    mpmd_dim: int
    makespan: float
    period: float
    workload: Workload = dataclasses.field(repr=False)
    times: tuple[StepTimes, ...] = dataclasses.field(repr=False)

    @staticmethod
    def of(workload: Workload, times: tuple[StepTimes, ...]) -> Simulation:
        before, last = ([0.0] + [step.makespan for step in times])[-2:]
        return Simulation(
            mpmd_dim=workload.mpmd_dim,
            makespan=last,
            period=last - before,
            workload=workload,
            times=times,
        )

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        """One event per task, by group and start. An atomic cell or a run of a plan is one event."""
        return tuple(event for mpmd_idx in range(self.mpmd_dim) for event in self._events(mpmd_idx))

    @functools.cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """The times in which groups are idle, by group and start."""
        spans = (gap for mpmd_idx in range(self.mpmd_dim) for gap in self._gaps(mpmd_idx))
        return tuple(gap for gap in spans if gap.end > gap.start)

    @functools.cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each group, the times at which its memory changes, and its memory from then on.

        Memory of a schedule is the number of forwards whose residuals are held. Memory of a plan is the bytes
        on each device: the values, counted as ``verify`` counts them, XLA's temporaries while a task runs, if
        the plan's groups have compiled, and messages from when they are sent. Changes at the same time are in
        the order in which the group makes them.
        """
        return tuple(tuple(self._memory(mpmd_idx)) for mpmd_idx in range(self.mpmd_dim))

    @property
    def peaks(self) -> tuple[float, ...]:
        """For each group, the most memory that it holds at once."""
        return tuple(max(amount for _, amount in steps) for steps in self.memory)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each group, the time that it spends on tasks."""
        bounds = self.workload.bounds
        return tuple(
            sum(sum(step.durations[bounds[i] : bounds[i + 1]]) for step in self.times)
            for i in range(self.mpmd_dim)
        )

    @property
    def bubble(self) -> float:
        """The idle part of all groups' time, ``1 - busy / (makespan * groups)``.

        For GPipe with ``p`` groups and ``m`` microbatches it is ``(p - 1) / (m + p - 1)``.
        """
        whole = self.makespan * self.mpmd_dim
        return 1 - sum(self.busy) / whole if whole else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """The idle time divided by the busy time; for interleaved 1F1B it is ``(p - 1) / (v m)``."""
        busy = sum(self.busy)
        return self.makespan * self.mpmd_dim / busy - 1 if busy else 0.0

    def _events(self, mpmd_idx: int) -> Iterator[Event]:
        work = self.workload
        for step in self.times:
            for operation in work.operations(mpmd_idx):
                task = work.tasks[operation]
                if not isinstance(task, Instant):
                    start = step.starts[operation]
                    yield Event(mpmd_idx, task, start, start + step.durations[operation])

    def _gaps(self, mpmd_idx: int) -> Iterator[Gap]:
        work, time = self.workload, 0.0
        for step in self.times:
            for operation in work.operations(mpmd_idx):
                if step.starts[operation] > time:
                    yield from self._waits(mpmd_idx, operation, step, time)
                time = step.end(operation)
                for message in self._blocked(operation):
                    _, receiver = work.edge(message)
                    arrival = step.arrivals[message]
                    yield Gap(
                        mpmd_idx, time, arrival, f"sends {work.task_text(operation)} to group {receiver}"
                    )
                    time = arrival
        yield Gap(mpmd_idx, time, self.makespan, "nothing left to do")

    def _waits(self, mpmd_idx: int, operation: int, step: StepTimes, time: float) -> Iterator[Gap]:
        """The gaps of a group that is free from ``time`` on and waits for the messages of ``operation``."""
        work = self.workload
        if wait := awaited_message(work, step, operation, time):
            first = "" if time else "its first input, "
            task, (source, _) = work.task_text(wait.sender), work.edge(wait.message)
            yield Gap(mpmd_idx, time, wait.sent, f"waits for {first}{task} of group {source}")
            transfer = f"waits for {first}the transfer of {task} from group {source}"
            yield Gap(mpmd_idx, wait.sent, step.starts[operation], transfer)

    def _blocked(self, operation: int) -> range:
        """The messages whose arrival a blocking group awaits after an operation."""
        sends = self.workload.sends
        return range(sends[operation], sends[operation + 1]) if self.workload.costs.blocking else range(0)

    def _memory(self, mpmd_idx: int) -> Iterator[tuple[float, float]]:
        arrivals = sorted(self._arrivals(mpmd_idx))
        held = 0.0
        changes = heapq.merge(arrivals, self._changes(mpmd_idx), key=operator.itemgetter(0))
        for time, change in changes:
            held += change
            yield time, held

    def _arrivals(self, mpmd_idx: int) -> Iterator[tuple[float, float]]:
        """The times of messages to a group, and the memory that they take."""
        work = self.workload
        for step in self.times:
            for message in work.received[mpmd_idx]:
                sender = work.messages.senders[message]
                yield step.end(sender), work.arriving[message]

    def _changes(self, mpmd_idx: int) -> Iterator[tuple[float, float]]:
        """The changes of memory by the group's own operations."""
        work, time = self.workload, 0.0
        used: dict[int, float] = collections.defaultdict(float)
        for message in work.received[mpmd_idx]:
            used[work.messages.readers[message]] += work.arriving[message]
        held = 0.0
        for step in self.times:
            yield time, work.resident[mpmd_idx] - held
            held = work.resident[mpmd_idx]
            for operation in work.operations(mpmd_idx):
                held += work.at_start[operation]
                if change := work.at_start[operation] - used[operation]:
                    yield step.starts[operation], change
                time = step.end(operation)
                if blocked := self._blocked(operation):
                    time = step.arrivals[blocked[-1]]
                for change in work.at_end[operation]:
                    held += change
                    yield time, change
