"""Runs steps of groups that share cores: each group is slower while more groups are at work."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from mpmd.simulate.workload import DeadlockError, StepTimes, Workload


def run_sharing(
    workload: Workload, steps: int, begins: Sequence[float] | None = None
) -> tuple[StepTimes, ...]:
    """Runs steps in a row, each operation as early as possible.

    While ``n`` groups are at work, each runs at ``min(1, costs.at_once / n)`` of its speed (processor
    sharing). So this follows the events of all groups and steps in the order of time.

    Args:
      begins: when each group begins; ``None``: at 0.

    Raises: ``DeadlockError``.
    """
    machine = _Machine(workload, steps, begins or [0.0] * workload.mpmd_dim)
    machine.run()
    return tuple(machine.times)


class _Machine:
    """The groups at one moment.

    ``_at`` has the step and the operation of each group, and ``_coming`` the messages under way, by the time
    of arrival. ``_work`` is the work, in units of time at full speed, that an operation that runs from the
    begin would have done: all groups at work have the same speed. ``_ending`` has the value of ``_work`` at
    which each running operation ends. ``_occupied`` are the groups that run an operation, or have not begun.
    """

    def __init__(self, workload: Workload, steps: int, begins: Sequence[float]):
        self._workload = workload
        self._steps = steps
        operations = len(workload.tasks)
        self.times = [
            StepTimes(
                starts=[0.0] * operations,
                durations=[0.0] * operations,
                arrivals=[0.0] * len(workload.messages.readers),
                awaited=[-1] * operations,
                group_ends=[0.0] * workload.mpmd_dim,
            )
            for _ in range(steps)
        ]
        missing = [0] * operations
        for reader in workload.messages.readers:
            missing[reader] += 1
        self._missing = [list(missing) for _ in range(steps)]
        self._links = [workload.costs.link_of(edge) for edge in workload.edges]
        self._busy = [0.0] * len(workload.edges)
        self._at = [(0, start) for start in workload.bounds[:-1]]
        self._occupied = set(range(workload.mpmd_dim))
        self._ending: list[tuple[float, int]] = []
        self._coming: list[tuple[float, int, int]] = []
        self._beginning = sorted((time, group) for group, time in enumerate(begins))[::-1]
        self._work = 0.0
        self._now = 0.0

    def run(self) -> None:
        while self._beginning or self._ending or self._coming:
            for group in self._advance():
                self._go_on(group)
        if any(step < self._steps for step, _ in self._at):
            raise DeadlockError

    def _advance(self) -> Iterator[int]:
        """Advances to the next begin, end or arrival; yields the groups that may start an operation."""
        speed = min(1.0, self._workload.costs.at_once / max(1, len(self._ending)))
        event = min(
            self._beginning[-1][0] if self._beginning else math.inf,
            self._coming[0][0] if self._coming else math.inf,
        )
        done = self._ending[0][0] if self._ending else math.inf
        if (end := self._now + (done - self._work) / speed) <= event:
            self._now, self._work = end, done
        else:
            self._now, self._work = event, self._work + (event - self._now) * speed
        while self._ending and self._ending[0][0] <= self._work:
            _, group = heapq.heappop(self._ending)
            self._occupied.remove(group)
            self._end(group)
            yield group
        while self._beginning and self._beginning[-1][0] <= self._now:
            _, group = self._beginning.pop()
            self._occupied.remove(group)
            yield group
        while self._coming and self._coming[0][0] <= self._now:
            _, step, message = heapq.heappop(self._coming)
            reader = self._workload.messages.readers[message]
            self._missing[step][reader] -= 1
            self.times[step].awaited[reader] = message
            receiver = self._workload.edge(message)[1]
            if self._at[receiver] == (step, reader) and not self._missing[step][reader]:
                yield receiver

    def _go_on(self, group: int) -> None:
        """Starts the group's next operation if its messages have arrived; a duration of 0 ends at once."""
        work = self._workload
        while group not in self._occupied:
            step, operation = self._at[group]
            if operation == work.bounds[group + 1]:
                self.times[step].group_ends[group] = self._now
                step, operation = self._at[group] = (step + 1, work.bounds[group])
            if step == self._steps or self._missing[step][operation]:
                return
            self.times[step].starts[operation] = self._now
            if work.durations[operation]:
                self._occupied.add(group)
                heapq.heappush(self._ending, (self._work + work.durations[operation], group))
            else:
                self._end(group)

    def _end(self, group: int) -> None:
        step, operation = self._at[group]
        times, work = self.times[step], self._workload
        times.durations[operation] = self._now - times.starts[operation]
        for message in range(work.sends[operation], work.sends[operation + 1]):
            edge = work.messages.edge_numbers[message]
            self._busy[edge] = max(self._now, self._busy[edge]) + (
                work.messages.nbytes[message] / self._links[edge].bandwidth
            )
            times.arrivals[message] = self._busy[edge] + self._links[edge].latency
            heapq.heappush(self._coming, (times.arrivals[message], step, message))
        self._at[group] = (step, operation + 1)
