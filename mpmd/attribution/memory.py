"""The memory of each group's devices over a recorded step."""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections.abc import Collection, Iterator, Mapping

from mpmd.attribution.clocks import MatchedStep
from mpmd.ir.plan import Edge, GroupProgram, Name, Plan, Recv
from mpmd.ir.process_times import ProcessTimes
from mpmd.memory import MemoryParts, sizes_on_devices
from mpmd.memory.kinds import KINDS, kinds_of
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
    sizes, kinds = sizes_on_devices(plan, program.mpmd_idx), kinds_of(plan, program, updated)
    moments = list(held_moments(plan, program, sizes, kinds))
    if times is None:  # the group has no part in the step
        return MemoryOverTime(program.mpmd_idx, (0,), (_parts(moments[0].by_kind, 0, None),))
    temporaries = {e.name: e.memory.temporaries for e in plan.executables_of(program.mpmd_idx) if e.memory}
    values = list(_value_changes(moments, times, temporaries))
    messages = sorted(_message_changes(program, values, times, sizes), key=operator.itemgetter(0))
    held, used, in_flight = moments[0].by_kind, 0, 0
    over_time: dict[int, MemoryParts] = {}
    changes: Iterator[tuple[int, _Values | int]] = heapq.merge(values, messages, key=operator.itemgetter(0))
    for time, change in changes:
        if isinstance(change, int):
            in_flight += change
        else:
            held, used = change.by_kind, change.temporaries
        over_time[max(time, 0)] = _parts(held, in_flight, used if temporaries else None)
    return MemoryOverTime(program.mpmd_idx, tuple(over_time), tuple(over_time.values()))


@dataclasses.dataclass(frozen=True)
class _Values:
    """The values that a group holds from some time on, and the messages whose use begins then."""

    by_kind: tuple[int, ...]
    temporaries: int
    taken: tuple[tuple[Edge, int], ...]


def _value_changes(
    moments: Collection[HeldMoment], times: ProcessTimes, temporaries: Mapping[str, int]
) -> Iterator[tuple[int, _Values]]:
    """The changes of values, in the order of the program. Values are dropped as soon as a task has ended."""
    tasks = iter(times.tasks)
    waits = {((wait.src, times.mpmd_idx), wait.tag): wait.end for wait in times.waits}
    time = 0
    for moment in moments:
        if moment.run is None:
            time = max([time, *(waits[key] for key in moment.taken)])
            yield time, _Values(moment.by_kind, 0, moment.taken)
        else:
            task = next(tasks)
            yield task.start, _Values(moment.by_kind, temporaries.get(moment.run.executable, 0), moment.taken)
            time = task.end
            yield time, _Values(moment.by_kind, 0, ())


def _message_changes(
    program: GroupProgram,
    values: Collection[tuple[int, _Values]],
    times: ProcessTimes,
    sizes: Mapping[Name, int],
) -> Iterator[tuple[int, int]]:
    """The bytes of each message: positive when it arrives, negative when its use begins."""
    nbytes = {
        ((recv.src, program.mpmd_idx), recv.tag): sum(sizes[name] for name in recv.values)
        for recv in program.instructions
        if isinstance(recv, Recv)
    }
    for wait in times.waits:
        yield wait.arrived, nbytes[(wait.src, program.mpmd_idx), wait.tag]
    for time, change in values:
        for key in change.taken:
            yield time, -nbytes[key]


def _parts(by_kind: tuple[int, ...], messages: int, temporaries: int | None) -> MemoryParts:
    return MemoryParts(**dict(zip(KINDS, by_kind, strict=True)), messages=messages, temporaries=temporaries)
