"""The memory of each group's devices over a recorded step."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpmd.attribution.clocks import MatchedStep
from mpmd.ir.messages import first_uses
from mpmd.ir.plan import GroupProgram, Name, Plan
from mpmd.ir.process_times import ProcessTimes
from mpmd.memory import MemoryParts, sizes_on_devices
from mpmd.memory.values import HeldMoment, held_moments


@dataclasses.dataclass(frozen=True)
class MemoryOverTime:
    """The bytes that each device of a group holds in one step.

    Attributes:
      times: when the bytes change, in nanoseconds since the driver's call, ascending; the first is 0.
      parts: the bytes from each time on, by their purpose. A message counts in ``messages`` from its arrival
        until its use; memory that transports keep for longer is not counted.
    """

    mpmd_idx: int
    times: tuple[int, ...]
    parts: tuple[MemoryParts, ...]

    @property
    def peak(self) -> tuple[int, MemoryParts]:
        """The time from which a device holds the most bytes, and these bytes by purpose."""
        return max(zip(self.times, self.parts, strict=True), key=lambda moment: moment[1].total)


def memory_over_time(plan: Plan, step: MatchedStep, updated: Collection[Name]) -> tuple[MemoryOverTime, ...]:
    """The memory of each group, by the times of its first process.

    Args:
      updated: the arguments that the step returns updated.
    """
    first = {times.mpmd_idx: times for times in step.processes if times.rank == 0}
    return tuple(_of_group(plan, program, first.get(program.mpmd_idx), updated) for program in plan.programs)


def _of_group(
    plan: Plan, program: GroupProgram, times: ProcessTimes | None, updated: Collection[Name]
) -> MemoryOverTime:
    sizes = sizes_on_devices(plan, program.mpmd_idx)
    moments = list(held_moments(plan, program, sizes, updated))
    if times is None:  # the group has no part in the step
        return MemoryOverTime(program.mpmd_idx, (0,), (MemoryParts(*moments[0].by_kind),))
    temporaries = {e.name: e.memory.temporaries for e in plan.executables_of(program.mpmd_idx) if e.memory}
    changes = _changes(program, moments, times, sizes, temporaries)
    held, used, in_flight = moments[0].by_kind, 0, 0
    over_time: dict[int, MemoryParts] = {}
    for change in sorted(changes, key=lambda change: change.time):
        in_flight += change.messages
        if change.by_kind is not None:
            held, used = change.by_kind, change.temporaries
        over_time[max(change.time, 0)] = dataclasses.replace(
            MemoryParts(*held), messages=in_flight, temporaries=used if temporaries else None
        )
    return MemoryOverTime(program.mpmd_idx, tuple(over_time), tuple(over_time.values()))


class _Change(NamedTuple):
    """A change of the bytes on each device of a group.

    Attributes:
      messages: the bytes by which the messages grow that have come and are not used yet.
      by_kind: the bytes of values from then on; ``None`` when a message arrives, which changes no value.
      temporaries: the bytes of XLA from then on.
    """

    time: int
    messages: int
    by_kind: tuple[int, ...] | None = None
    temporaries: int = 0


def _changes(
    program: GroupProgram,
    moments: Sequence[HeldMoment],
    times: ProcessTimes,
    sizes: Mapping[Name, int],
    temporaries: Mapping[str, int],
) -> Iterator[_Change]:
    """Yields the changes of values in the order of the program, then the arrivals of messages.

    Values are dropped as soon as a task has ended.
    """
    nbytes = {
        key: sum(sizes[name] for name in values)
        for messages in first_uses(program)
        for key, values in messages.items()
    }
    waits = {((wait.src, program.mpmd_idx), wait.tag): wait for wait in times.waits}
    tasks, time = iter(times.tasks), 0
    for moment in moments:
        begins_use = -sum(nbytes[key] for key in moment.taken)
        if moment.run is None:
            time = max([time, *(waits[key].end for key in moment.taken)])
            yield _Change(time, begins_use, moment.by_kind)
        else:
            _, start, time, _ = next(tasks)
            yield _Change(start, begins_use, moment.by_kind, temporaries.get(moment.run.executable, 0))
            yield _Change(time, 0, moment.by_kind)
    for key, wait in waits.items():
        yield _Change(wait.arrived, nbytes[key])
