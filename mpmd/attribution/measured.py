"""The recorded steps of a plan as the columns that a simulation of the plan has, and medians over all steps.

A group of several processes starts and ends a task or a message when its last process does. Times are whole
nanoseconds since the driver's call and lie within the step, whatever the clocks say, so that all differences
add up.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mpmd.attribution.clocks import MatchedStep
from mpmd.attribution.cores import groups_at_once
from mpmd.ir.plan import AnyTask, LoopStages, OutsideTask, Plan, TaskType
from mpmd.ir.process_times import Host, ProcessTimes, SendTime, TaskTime, WaitTime
from mpmd.ir.routes import Topology
from mpmd.simulate.costs import Costs, types_of
from mpmd.simulate.plan import message_keys, plan_workload
from mpmd.simulate.workload import Instant, StepTimes, Workload
from mpmd.util.grouping import grouped

TypeKey = tuple[int, OutsideTask | tuple[TaskType, ...]]
"""The tasks that should take equally long: a group's tasks of equal kinds and stages, or an outside task."""


@dataclasses.dataclass(frozen=True)
class Measured(StepTimes[int]):
    """A recorded step, in nanoseconds since the driver's call.

    Operations that are no tasks take no time: the first of a group is the moment when the group has the
    step's arguments, an operation that only waits ends when the group has its messages, and the last is the
    group's reply.

    Attributes:
      workload: the operations and messages. The duration of an operation is the median of its type.
      loops: the stages of each loop, if there are several.
      processor: by operation, the processor time; ``None`` where it is not known.
      asked: by message, when the receiver turned to it.
      taken: by message, when the receiver had taken it in.
      sent: by message, when the sender turned to it.
      received: by group, when the group turned to the driver's request.
      returned: when the driver had all replies: the end of the step.
      step: the number of the step among the recorded ones.
      steps: the number of steps over which medians are.
      at_once: how many groups can compute at once, as in ``Costs``.
    """

    workload: Workload
    loops: tuple[LoopStages, ...]
    processor: list[int | None]
    asked: list[int]
    taken: list[int]
    sent: list[int]
    received: list[int]
    returned: int
    step: int = 0
    steps: int = 1
    at_once: float = math.inf

    @property
    def groups(self) -> range:
        return range(self.workload.mpmd_dim)

    def operations(self, group: int) -> range:
        return self.workload.operations(group)

    def tasks(self, group: int) -> Iterator[int]:
        tasks = self.workload.tasks
        return (i for i in self.operations(group) if not isinstance(tasks[i], Instant))

    def began(self, group: int) -> int:
        """The time at which a group had the arguments of the step."""
        return self.starts[self.workload.bounds[group]]

    @property
    def last_reply(self) -> int:
        """The operation that ends the step of the group that replies last."""
        last = max(self.groups, key=self.group_ends.__getitem__)
        return self.workload.bounds[last + 1] - 1

    def idle(self, group: int) -> int:
        """The time from the call to the return that the group does not spend on tasks."""
        return self.returned - sum(self.durations[task] for task in self.tasks(group))


def type_of(group: int, task: AnyTask) -> TypeKey:
    return group, task if isinstance(task, OutsideTask) else types_of(task)


def types_of_operations(workload: Workload) -> list[TypeKey | None]:
    return [
        None if isinstance(task := workload.tasks[operation], Instant) else type_of(group, task)
        for group in range(workload.mpmd_dim)
        for operation in workload.operations(group)
    ]


def measure(plan: Plan, steps: Sequence[MatchedStep], topology: Topology | None = None) -> Measured:
    """Returns the recorded step of median length with the medians over all recorded steps.

    Steps for which groups were replaced are left out, unless all steps are.

    Args:
      steps: at least one, of this plan, by the driver's clock. ``Profile.load`` checks the steps of a file.
      topology: of the groups, for the bytes of messages; ``None``: whole values travel.

    """
    kept = [i for i, step in enumerate(steps) if step.recovery is None] or list(range(len(steps)))
    chosen = sorted(kept, key=lambda i: (steps[i].returned, i))[(len(kept) - 1) // 2]
    by_group = {i: _by_group(plan, steps[i]) for i in kept}
    workload = plan_workload(plan, Costs(), topology)
    workload = dataclasses.replace(workload, durations=_medians(workload, by_group.values()))
    measured = _columns(plan, workload, by_group[chosen], steps[chosen].returned)
    at_once = groups_at_once(steps[chosen].processes, topology)
    return dataclasses.replace(measured, step=chosen, steps=len(kept), at_once=at_once)


def _by_group(plan: Plan, step: MatchedStep) -> list[ProcessTimes]:
    processes = grouped((process.mpmd_idx, process) for process in step.processes)
    return [
        _last_process(program.mpmd_idx, processes.get(program.mpmd_idx, ()), step.returned)
        for program in plan.programs
    ]


def _last_process(group: int, processes: Sequence[ProcessTimes], returned: int) -> ProcessTimes:
    """Combines processes: each moment is the last process's, from 0 to ``returned``."""
    if not processes:  # the group has no part in the step
        return ProcessTimes(group, 0, Host("", ""), 0, 0, 0, 0)
    waits = grouped(((wait.src, wait.tag), wait) for process in processes for wait in process.waits)
    sends = grouped(((send.dst, send.tag), send) for process in processes for send in process.sends)

    def last(spans: Iterable[Any], moment: str) -> int:
        return min(max(0, *(getattr(span, moment) for span in spans)), returned)

    return dataclasses.replace(
        processes[0],
        received=last(processes, "received"),
        ready=last(processes, "ready"),
        replied=last(processes, "replied"),
        tasks=tuple(
            TaskTime(
                spans[0].task,
                last(spans, "start"),
                last(spans, "end"),
                max(spans, key=lambda span: span.end).processor,
            )
            for spans in zip(*(process.tasks for process in processes), strict=True)
        ),
        waits=tuple(
            WaitTime(*key, *(last(spans, moment) for moment in ("start", "end", "arrived")))
            for key, spans in waits.items()
        ),
        sends=tuple(SendTime(*key, last(spans, "start"), last(spans, "end")) for key, spans in sends.items()),
    )


def _medians(workload: Workload, steps: Iterable[Sequence[ProcessTimes]]) -> list[float]:
    """Returns for each operation the median time of its type in all steps; 0 for waits and replies."""
    keys = types_of_operations(workload)
    spans = ([task for group in groups for task in group.tasks] for groups in steps)
    times = grouped(
        (key, task.end - task.start)
        for tasks in spans
        for key, task in zip(filter(None, keys), tasks, strict=True)
    )
    medians = {key: int(statistics.median(of_type)) for key, of_type in times.items()}
    return [0 if key is None else medians[key] for key in keys]


def _columns(plan: Plan, workload: Workload, groups: Sequence[ProcessTimes], returned: int) -> Measured:
    numbers = {key: number for number, key in enumerate(message_keys(plan))}
    arrivals, asked, taken, sent = ([0] * len(numbers) for _ in range(4))
    starts, durations, had_messages = ([0] * len(workload.tasks) for _ in range(3))
    awaited: list[int] = [-1] * len(starts)
    processor: list[int | None] = [None] * len(starts)
    for group, times in enumerate(groups):
        operations = workload.operations(group)
        for send in times.sends:
            sent[numbers[(group, send.dst), send.tag]] = send.start
        for wait in times.waits:
            message = numbers[(wait.src, group), wait.tag]
            asked[message], taken[message], arrivals[message] = wait.start, wait.end, wait.arrived
            operation = workload.messages.readers[message]
            had_messages[operation] = max(had_messages[operation], wait.end)
            before = awaited[operation]
            if wait.arrived > wait.start and (before < 0 or asked[before] < wait.start):
                awaited[operation] = message
        time, tasks = times.ready, iter(times.tasks)
        for operation in operations:
            if isinstance(workload.tasks[operation], Instant):
                starts[operation] = time = max(time, had_messages[operation])
            else:
                _, starts[operation], time, processor[operation] = next(tasks)
                durations[operation] = time - starts[operation]
        starts[operations[-1]] = max(time, times.replied)
    return Measured(
        starts=starts,
        durations=durations,
        arrivals=arrivals,
        awaited=awaited,
        group_ends=[starts[end - 1] for end in workload.bounds[1:]],
        workload=workload,
        loops=plan.loops,
        processor=processor,
        asked=asked,
        taken=taken,
        sent=sent,
        received=[times.received for times in groups],
        returned=returned,
    )
