"""The times of one process in one step, in whole nanoseconds of its clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mpmd.ir.events import Event, Wait
from mpmd.ir.tasks import AnyTask

NANOSECONDS = 1_000_000_000


class TaskTime(NamedTuple):
    """A task from ``start`` to ``end``.

    Attributes:
      processor: the processor time of all threads of the process meanwhile; ``None`` where several groups
        share the process, and for tasks of accelerators.
    """

    task: AnyTask
    start: int
    end: int
    processor: int | None = None

    def event(self, mpmd_idx: int) -> Event:
        """The task as an event of a group, in seconds."""
        return Event(mpmd_idx, self.task, self.start / NANOSECONDS, self.end / NANOSECONDS)


class WaitTime(NamedTuple):
    """The receive of message ``tag`` of group ``src``, from ``start`` to ``end``.

    Attributes:
      arrived: when the message had come, perhaps long before ``start``.
    """

    src: int
    tag: int
    start: int
    end: int
    arrived: int

    def event(self, mpmd_idx: int) -> Event:
        """The wait as an event of a group, in seconds."""
        return Event(mpmd_idx, Wait(self.src, self.tag), self.start / NANOSECONDS, self.end / NANOSECONDS)


class SendTime(NamedTuple):
    """The handing of message ``tag`` for group ``dst`` to the transport, from ``start`` to ``end``."""

    dst: int
    tag: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Host:
    """The node, the clock and the cores of a process.

    Attributes:
      name: the name of the node.
      clock: the name of the node's monotonic clock; processes with equal names read the same clock.
      cores: the numbers of the node's cores on which the process may run; empty: unknown.
    """

    name: str
    clock: str
    cores: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ProcessTimes:
    """All times of one process of a group in one step, in nanoseconds of its clock.

    Attributes:
      mpmd_idx, rank: the group of the process, and the number of the process within the group.
      received: when the process began to handle the driver's request.
      ready: when the step's arguments were on the devices of the process.
      finished: when the last operation had ended.
      replied: when the reply was complete.
      tasks, waits, sends: the spans of each kind, in the order of time.
      on_cores: whether its tasks run on the cores of the host, and not on an accelerator.
      has_device_times: whether the times of tasks come from the accelerator's trace. Otherwise the process
        has timed each task and waited for its end.
    """

    mpmd_idx: int
    rank: int
    host: Host
    received: int
    ready: int
    finished: int
    replied: int
    tasks: tuple[TaskTime, ...] = ()
    waits: tuple[WaitTime, ...] = ()
    sends: tuple[SendTime, ...] = ()
    on_cores: bool = False
    has_device_times: bool = False

    def shifted(self, offset: int) -> ProcessTimes:
        """The same times by a clock that is ahead by ``offset`` nanoseconds."""
        return dataclasses.replace(
            self,
            received=self.received + offset,
            ready=self.ready + offset,
            finished=self.finished + offset,
            replied=self.replied + offset,
            tasks=tuple(t._replace(start=t.start + offset, end=t.end + offset) for t in self.tasks),
            waits=tuple(
                w._replace(start=w.start + offset, end=w.end + offset, arrived=w.arrived + offset)
                for w in self.waits
            ),
            sends=tuple(s._replace(start=s.start + offset, end=s.end + offset) for s in self.sends),
        )

    def renumbered(self, numbers: Mapping[int, int]) -> ProcessTimes:
        return dataclasses.replace(
            self,
            mpmd_idx=numbers[self.mpmd_idx],
            waits=tuple(w._replace(src=numbers[w.src]) for w in self.waits),
            sends=tuple(s._replace(dst=numbers[s.dst]) for s in self.sends),
        )

    def events(self) -> Iterator[Event]:
        """The tasks and waits, in the order of time, in seconds."""
        spans: list[TaskTime | WaitTime] = sorted(
            [*self.tasks, *self.waits], key=lambda span: (span.start, span.end)
        )
        return (span.event(self.mpmd_idx) for span in spans)


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """One step as the driver and all processes have recorded it, each by its own clock.

    Attributes:
      driver: the host of the driver.
      called: when the driver called the step.
      returned: when the driver had the replies of all groups.
      processes: the times of each process, by group and rank; without groups that have no part in the step.
      is_recovered: whether groups were replaced since the step before, so that the driver waited, and groups
        perhaps ran the step again. The times of processes are from the last run.
    """

    driver: Host
    called: int
    returned: int
    processes: tuple[ProcessTimes, ...]
    is_recovered: bool = False
