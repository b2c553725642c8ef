"""What a simulation found: when each task runs, why groups are idle, and what they hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from mpmd.simulate.workload import StepTimes, Workload
from mpmd.timeline import Event


@dataclasses.dataclass(frozen=True)
class Gap:
    """A span in which a group is idle, and why: what it waits for, what it sends, or nothing left to do."""

    mpmd_idx: int
    start: float
    end: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Simulation:
    """When everything happens, in the costs' unit of time; the first step starts at 0.

    The events and gaps of a group fill the time from 0 to ``makespan``.

    Attributes:
      mpmd_dim: the number of groups.
      makespan: when the last group is through with the last step.
      period: by how much the last step ends later than the one before it; of a single step, its makespan.
    """

    mpmd_dim: int
    makespan: float
    period: float
    _workload: Workload = dataclasses.field(repr=False)
    _times: tuple[StepTimes, ...] = dataclasses.field(repr=False)

    @staticmethod
    def of(workload: Workload, times: tuple[StepTimes, ...]) -> Simulation:
        """What is known once all operations have a time."""
        before, last = ([0.0] + [max(step.ends, default=0.0) for step in times])[-2:]
        return Simulation(workload.mpmd_dim, last, last - before, workload, times)

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        """One event per task, by group and start. An atomic cell is one event, as is a run of a plan."""
        return tuple(event for mpmd_idx in range(self.mpmd_dim) for event in self._events(mpmd_idx))

    @functools.cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Where groups are idle, by group and start."""
        spans = (gap for mpmd_idx in range(self.mpmd_dim) for gap in self._gaps(mpmd_idx))
        return tuple(gap for gap in spans if gap.end > gap.start)

    @functools.cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each group the times at which what it holds changes, and what it holds from then on.

        Of a schedule, the forwards whose residuals are held; of a plan, bytes, counted as ``verify`` does.
        Several changes at one time are in the order in which the group makes them.
        """
        return tuple(tuple(self._memory(mpmd_idx)) for mpmd_idx in range(self.mpmd_dim))

    @property
    def peaks(self) -> tuple[float, ...]:
        """For each group the most it holds at once."""
        return tuple(max(amount for _, amount in steps) for steps in self.memory)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each group the time it spends on tasks."""
        durations, bounds = self._workload.durations, self._workload.bounds
        return tuple(
            len(self._times) * sum(durations[bounds[i] : bounds[i + 1]]) for i in range(self.mpmd_dim)
        )

    @property
    def bubble(self) -> float:
        """The idle part of all groups' time, ``1 - busy / (makespan * groups)``; for GPipe
        ``(p - 1) / (m + p - 1)``."""
        whole = self.makespan * self.mpmd_dim
        return 1 - sum(self.busy) / whole if whole else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """The idle time over the busy time; for interleaved 1F1B ``(p - 1) / (v m)``."""
        busy = sum(self.busy)
        return self.makespan * self.mpmd_dim / busy - 1 if busy else 0.0

    def _events(self, mpmd_idx: int) -> Iterator[Event]:
        work = self._workload
        for step in self._times:
            for operation in work.operations(mpmd_idx):
                if operation not in work.hidden:
                    start = step.starts[operation]
                    end = start + work.durations[operation]
                    yield Event(mpmd_idx, str(work.labels[operation]), start, end)

    def _gaps(self, mpmd_idx: int) -> Iterator[Gap]:
        work, time = self._workload, 0.0
        for step in self._times:
            for operation in work.operations(mpmd_idx):
                if step.starts[operation] > time:
                    yield from self._waits(mpmd_idx, operation, step, time)
                time = step.starts[operation] + work.durations[operation]
                for message in self._blocked(operation):
                    _, receiver = work.edge(message)
                    arrival = step.arrivals[message]
                    yield Gap(mpmd_idx, time, arrival, f"sends {work.labels[operation]} to group {receiver}")
                    time = arrival
        yield Gap(mpmd_idx, time, self.makespan, "nothing left to do")

    def _waits(self, mpmd_idx: int, operation: int, step: StepTimes, time: float) -> Iterator[Gap]:
        """What a group that is free from ``time`` waits for before an operation: the last of its messages."""
        work, message = self._workload, step.causes[operation]
        sender = work.messages.senders[message]
        source, _ = work.edge(message)
        made = max(time, step.starts[sender] + work.durations[sender])
        what = "waits for its first input, " if time == 0 else "waits for "
        yield Gap(mpmd_idx, time, made, f"{what}{work.labels[sender]} of group {source}")
        transfer = f"{what}the transfer of {work.labels[sender]} from group {source}"
        yield Gap(mpmd_idx, made, step.starts[operation], transfer)

    def _blocked(self, operation: int) -> range:
        """The messages that keep the group from going on when an operation has ended."""
        sends = self._workload.sends
        return range(sends[operation], sends[operation + 1]) if self._workload.costs.blocking else range(0)

    def _memory(self, mpmd_idx: int) -> Iterator[tuple[float, float]]:
        work, time = self._workload, 0.0
        for step in self._times:
            held = work.resident[mpmd_idx]
            yield time, held
            for operation in work.operations(mpmd_idx):
                if work.at_start[operation]:
                    held += work.at_start[operation]
                    yield step.starts[operation], held
                time = step.starts[operation] + work.durations[operation]
                if blocked := self._blocked(operation):
                    time = step.arrivals[blocked[-1]]
                for change in work.at_end[operation]:
                    held += change
                    yield time, held
