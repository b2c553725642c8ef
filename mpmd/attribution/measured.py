"""A measured step as columns of numbers: when each operation of a plan ran, and which message it took in.

A group of several processes starts a task when the last of them does, and ends it when the last one ends;
so with messages. Times are whole nanoseconds since the driver's call and lie within the step, whatever the
clocks say, so that all differences of them add up.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mpmd.attribution.clocks import MatchedStep
from mpmd.attribution.cores import sharing
from mpmd.ir.plan import AnyTask, GroupProgram, LoopStages, OutsideTask, Plan, TaskType
from mpmd.ir.process_times import ProcessTimes
from mpmd.ir.routes import Topology
from mpmd.simulate.costs import Costs, types_of
from mpmd.simulate.plan import MessageKey, message_keys, plan_workload
from mpmd.simulate.workload import Instant, Workload

TypeKey = tuple[int, OutsideTask | tuple[TaskType, ...]]
"""The tasks that should take equally long: a group's of the same kinds and stages, or an outside task."""


class Receipt(NamedTuple):
    """The taking in of a message from ``start`` to ``end``, which had come at ``arrived``."""

    message: int
    start: int
    end: int
    arrived: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """The times of a step by operation, message and group, as a ``Workload`` numbers them.

    What is no task takes no time: the arguments are there when the group is ready, an operation that only
    waits ends when it has its messages, and the end of the step is the group's reply.

    Attributes:
      workload: the operations and messages. An operation's duration is the median of its type.
      loops: the stages of each loop, if there are several.
      starts, ends: by operation.
      processor: by operation, the processor time; ``None`` where it is not known.
      receipts: for each operation, the messages taken in since the operation before, in order.
      sent: by message, when its sender turned to it.
      received: by group, when it turned to the driver's request.
      returned: when the driver had all replies: the end of the step.
      step: the number of the step among those that were recorded.
      steps: the number of steps over which medians are.
      at_once: the number of groups that can compute at once, each as fast as alone; infinite where each has
        cores of its own.
      loads: as how many groups each counts while it computes; by default 1.
    """

    workload: Workload
    loops: tuple[LoopStages, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    processor: tuple[int | None, ...]
    receipts: tuple[tuple[Receipt, ...], ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    returned: int
    step: int = 0
    steps: int = 1
    at_once: float = math.inf
    loads: tuple[float, ...] = ()

    @property
    def groups(self) -> range:
        """The numbers of the groups."""
        return range(self.workload.mpmd_dim)

    def operations(self, group: int) -> range:
        """The operations of a group."""
        return self.workload.operations(group)

    def tasks(self, group: int) -> Iterator[int]:
        """The operations of a group that are tasks."""
        tasks = self.workload.tasks
        return (i for i in self.operations(group) if not isinstance(tasks[i], Instant))

    def began(self, group: int) -> int:
        """The time at which a group had the arguments of the step."""
        return self.ends[self.workload.bounds[group]]

    def final(self, group: int) -> int:
        """The operation that ends a group's step."""
        return self.workload.bounds[group + 1] - 1

    def duration(self, operation: int) -> int:
        """The time that an operation took."""
        return self.ends[operation] - self.starts[operation]

    def idle(self, group: int) -> int:
        """The time from the call to the return that the group does not spend on tasks."""
        return self.returned - sum(map(self.duration, self.tasks(group)))


def type_of(group: int, task: AnyTask) -> TypeKey:
    """The type of a group's task."""
    return group, task if isinstance(task, OutsideTask) else types_of(task)


def measure(plan: Plan, steps: Sequence[MatchedStep], topology: Topology | None = None) -> Measured:
    """The step of median length among recorded steps, with the medians of all of them.

    Steps for which groups were replaced are left out, unless there is no other.

    Args:
      steps: by the driver's clock.
      topology: of the groups, for the bytes of messages; ``None``: those of whole values.

    Raises: ``ValueError`` for no steps, and for those of another plan.
    """
    if not steps:
        raise ValueError("there is no recorded step to explain")
    workload = plan_workload(plan, Costs(), topology)
    kept = [i for i, step in enumerate(steps) if step.recovery is None] or list(range(len(steps)))
    recorded = {i: _StepTimes.of(plan, steps[i]) for i in kept}
    durations = [
        [span.end - span.start for of_group in times.groups for span in of_group.tasks]
        for times in recorded.values()
    ]
    chosen = sorted(kept, key=lambda i: (steps[i].returned, i))[(len(kept) - 1) // 2]
    workload = with_medians(workload, durations)
    measured = _columns(plan, workload, recorded[chosen], step=chosen, steps=len(kept))
    at_once, loads = sharing(steps[chosen].processes, topology)
    return dataclasses.replace(measured, at_once=at_once, loads=loads)


class _Span(NamedTuple):
    start: int
    end: int
    processor: int | None = None
    arrived: int = 0


@dataclasses.dataclass(frozen=True)
class _GroupTimes:
    """The times of a group: of its last process, for each of them."""

    tasks: Sequence[_Span]
    waits: Mapping[MessageKey, _Span]
    sends: Mapping[MessageKey, int]
    received: int = 0
    ready: int = 0
    replied: int = 0

    @staticmethod
    def of(program: GroupProgram, processes: Sequence[ProcessTimes], last: int) -> _GroupTimes:
        """The times, all of them between 0 and ``last``."""

        def at(time: int) -> int:
            return min(max(time, 0), last)

        group, tasks = program.mpmd_idx, [run.task for run in program.runs]
        if tasks and not processes:
            raise ValueError(f"the times of group {group} are not recorded")
        for process in processes:
            _check_tasks(group, tasks, [task.task for task in process.tasks])
        spans = []
        for of_task in zip(*(process.tasks for process in processes), strict=True):
            slowest = max(of_task, key=lambda task: task.end)
            spans.append(_Span(at(max(task.start for task in of_task)), at(slowest.end), slowest.processor))
        waits: dict[MessageKey, _Span] = {}
        sends: dict[MessageKey, int] = {}
        for process in processes:
            for wait in process.waits:
                key = (wait.src, group), wait.tag
                span = _Span(at(wait.start), at(wait.end), arrived=at(wait.arrived))
                waits[key] = _later(waits[key], span) if key in waits else span
            for send in process.sends:
                key = (group, send.dst), send.tag
                sends[key] = max(sends.get(key, 0), at(send.start))
        return _GroupTimes(
            tasks=spans,
            waits=waits,
            sends=sends,
            received=at(max((process.received for process in processes), default=0)),
            ready=at(max((process.ready for process in processes), default=0)),
            replied=at(max((process.replied for process in processes), default=0)),
        )


def _later(a: _Span, b: _Span) -> _Span:
    return _Span(max(a.start, b.start), max(a.end, b.end), arrived=max(a.arrived, b.arrived))


def _check_tasks(group: int, planned: Sequence[AnyTask], recorded: Sequence[AnyTask]) -> None:
    """Raises ``ValueError`` for tasks that are not the plan's."""
    if list(planned) == list(recorded):
        return
    pairs = zip([*planned, None], [*recorded, None], strict=False)
    task, other = next(pair for pair in pairs if pair[0] != pair[1])
    raise ValueError(
        f"group {group} ran {other or 'nothing'} where the plan has {task or 'nothing'}: "
        "the times are those of another step"
    )


@dataclasses.dataclass(frozen=True)
class _StepTimes:
    """The times of all groups in a step."""

    groups: tuple[_GroupTimes, ...]
    returned: int

    @staticmethod
    def of(plan: Plan, step: MatchedStep) -> _StepTimes:
        processes: list[list[ProcessTimes]] = [[] for _ in plan.programs]
        for process in step.processes:
            if process.mpmd_idx >= len(processes):
                raise ValueError(f"the plan has no group {process.mpmd_idx}, of which times are recorded")
            processes[process.mpmd_idx].append(process)
        groups = (
            _GroupTimes.of(program, of_group, step.returned)
            for program, of_group in zip(plan.programs, processes, strict=True)
        )
        return _StepTimes(tuple(groups), step.returned)


def with_medians(workload: Workload, steps: Sequence[Sequence[int]]) -> Workload:
    """The workload with the median of its type as each operation's duration.

    Args:
      steps: the times of all tasks in each step, by group.
    """
    tasks = [
        (group, workload.tasks[operation])
        for group in range(workload.mpmd_dim)
        for operation in workload.operations(group)
    ]
    keys = [None if isinstance(task, Instant) else type_of(group, task) for group, task in tasks]
    times: dict[TypeKey, list[int]] = collections.defaultdict(list)
    for step in steps:
        for key, time in zip(filter(None, keys), step, strict=True):
            times[key].append(time)
    medians = {key: int(statistics.median(of_type)) for key, of_type in times.items()}
    durations: list[float] = [0 if key is None else medians[key] for key in keys]
    return dataclasses.replace(workload, durations=durations)


def _columns(plan: Plan, workload: Workload, times: _StepTimes, step: int, steps: int) -> Measured:
    keys = message_keys(plan)
    numbers = {key: number for number, key in enumerate(keys)}
    count = len(workload.tasks)
    starts, ends = [0] * count, [0] * count
    processor: list[int | None] = [None] * count
    receipts: list[list[Receipt]] = [[] for _ in range(count)]
    for group, of_group in enumerate(times.groups):
        operations = workload.operations(group)
        for key, span in of_group.waits.items():
            message = numbers[key]
            reader = workload.messages.readers[message]
            taker = operations[-1] if reader < 0 else reader
            receipts[taker].append(Receipt(message, span.start, span.end, span.arrived))
        time, spans = of_group.ready, iter(of_group.tasks)
        for operation in operations:
            if isinstance(workload.tasks[operation], Instant):
                time = max([time, *(receipt.end for receipt in receipts[operation])])
                starts[operation] = ends[operation] = time
            else:
                span = next(spans)
                starts[operation], ends[operation], processor[operation] = span[:3]
                time = span.end
        starts[operations[-1]] = ends[operations[-1]] = max(time, of_group.replied)
    return Measured(
        workload=workload,
        loops=plan.loops,
        starts=tuple(starts),
        ends=tuple(ends),
        processor=tuple(processor),
        receipts=tuple(tuple(of_operation) for of_operation in receipts),
        sent=tuple(times.groups[edge[0]].sends.get((edge, tag), 0) for edge, tag in keys),
        received=tuple(of_group.received for of_group in times.groups),
        returned=times.returned,
        step=step,
        steps=steps,
    )
