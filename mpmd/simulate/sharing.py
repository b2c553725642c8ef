"""Runs steps of groups that share cores, so that each is the slower the more of them are at work."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from mpmd.simulate.workload import StepTimes, Workload, deadlock

_ROUNDING = 1e-9


def run_sharing(workload: Workload, steps: int) -> tuple[StepTimes, ...]:
    """Runs steps in a row, each operation as early as possible.

    While ``n`` groups are at work, each goes on at ``costs.at_once / n`` of its speed, at most at its speed
    (processor sharing). Events are therefore followed in the order of time, of all steps together.

    Raises: ``ValueError`` when the groups deadlock, with what each waits for.
    """
    machine = _Machine(workload, steps)
    machine.run()
    return tuple(machine.times)


class _Machine:
    """The groups at one moment.

    ``_at`` has the step and the operation of each group, ``_left`` what is left of the operations under way,
    as the time it would take alone, and ``_coming`` the messages under way by the time they arrive.
    """

    def __init__(self, workload: Workload, steps: int):
        self._workload = workload
        self._steps = steps
        self.times = [self._no_times() for _ in range(steps)]
        missing = [0] * len(workload.tasks)
        for reader in workload.messages.readers:
            if reader >= 0:
                missing[reader] += 1
        self._missing = [list(missing) for _ in range(steps)]
        self._links = [workload.costs.link_of(edge) for edge in workload.edges]
        self._busy = [0.0] * len(workload.edges)
        self._at = [(0, start) for start in workload.bounds[:-1]]
        self._left: dict[int, float] = {}
        self._coming: list[tuple[float, int, int]] = []
        self._now = 0.0

    def _no_times(self) -> StepTimes:
        work = self._workload
        operations, messages = len(work.tasks), len(work.messages.readers)
        return StepTimes(
            starts=[0.0] * operations,
            durations=[0.0] * operations,
            arrivals=[0.0] * messages,
            causes=[-1] * operations,
            ends=[0.0] * work.mpmd_dim,
        )

    def run(self) -> None:
        """Follows the groups to the end of the last step."""
        for group in range(self._workload.mpmd_dim):
            self._go_on(group)
        while self._left or self._coming:
            for group in self._advance():
                self._go_on(group)
        if unfinished := [step for step, _ in self._at if step < self._steps]:
            first = min(unfinished)
            ends = self._workload.bounds[1:]
            positions = [at if step == first else end for (step, at), end in zip(self._at, ends, strict=True)]
            raise ValueError(deadlock(self._workload, positions))

    def _advance(self) -> Iterator[int]:
        """Goes to the next moment at which something ends or arrives; yields the groups that may go on."""
        speed = min(1.0, self._workload.costs.at_once / max(len(self._left), 1))
        soonest = min(self._left.values(), default=float("inf")) / speed
        if self._coming and self._coming[0][0] - self._now < soonest:
            soonest = max(self._coming[0][0] - self._now, 0.0)
        self._now += soonest
        self._left = {group: left - soonest * speed for group, left in self._left.items()}
        for group, left in list(self._left.items()):
            step, operation = self._at[group]
            if left <= _ROUNDING * self._workload.durations[operation]:
                del self._left[group]
                self._end(group)
                yield group
        while self._coming and self._coming[0][0] <= self._now:
            _, step, message = heapq.heappop(self._coming)
            reader = self._workload.messages.readers[message]
            self._missing[step][reader] -= 1
            self.times[step].causes[reader] = message
            receiver = self._workload.edge(message)[1]
            if self._at[receiver] == (step, reader) and not self._missing[step][reader]:
                yield receiver

    def _go_on(self, group: int) -> None:
        """Starts operations that a group can start, and passes those that take no time."""
        work = self._workload
        while group not in self._left:
            step, operation = self._at[group]
            if operation == work.bounds[group + 1]:
                self.times[step].ends[group] = self._now
                step, operation = self._at[group] = (step + 1, work.bounds[group])
            if step == self._steps or self._missing[step][operation]:
                return
            self.times[step].starts[operation] = self._now
            if work.durations[operation]:
                self._left[group] = work.durations[operation]
            else:
                self._end(group)

    def _end(self, group: int) -> None:
        """Ends a group's operation, and sends its messages."""
        step, operation = self._at[group]
        times, work = self.times[step], self._workload
        times.durations[operation] = self._now - times.starts[operation]
        for message in range(work.sends[operation], work.sends[operation + 1]):
            edge = work.messages.edge_numbers[message]
            self._busy[edge] = max(self._now, self._busy[edge]) + (
                work.messages.nbytes[message] / self._links[edge].bandwidth
            )
            times.arrivals[message] = self._busy[edge] + self._links[edge].latency
            if work.messages.readers[message] >= 0:
                heapq.heappush(self._coming, (times.arrivals[message], step, message))
        self._at[group] = (step, operation + 1)
