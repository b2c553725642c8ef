"""Recorded steps that never ran: the operations of a plan with drawn times."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from mpmd.attribution.clocks import MatchedStep, match
from mpmd.ir.plan import AnyTask, Edge, OutsideTask, Plan
from mpmd.ir.process_times import Host, ProcessTimes, RecordedStep, SendTime, TaskTime, WaitTime
from mpmd.simulate import Simulation
from mpmd.simulate.costs import Costs
from mpmd.simulate.plan import message_keys, plan_workload
from mpmd.simulate.workload import Instant

UNITS = {"fwd": 1_000_000, "bwd": 2_000_000, "bwdA": 1_000_000, "bwdW": 1_000_000}
"""The nanoseconds of a task by its kind, if nothing disturbs it."""

OUTSIDE = 500_000
"""Those of a task outside of loops."""


def unit_time(group: int, task: AnyTask) -> int:
    """The time of a task in a step without a disturbance."""
    return OUTSIDE if isinstance(task, OutsideTask) else sum(UNITS[member.kind] for member in task.tasks)


@dataclasses.dataclass
class Timing:
    """The times of a step, in nanoseconds.

    Attributes:
      duration: of a group's task.
      processor: the part of a task's time in which the processor works; ``None``: unknown.
      flight: of a message over an edge.
      handling: before each task, and before a reply.
      sending: to hand over each message, one after another.
      received: of a group, from the call to its request.
      arguments: of a group, from the request to its arguments.
      reply: from the last reply to the return.
    """

    duration: Callable[[int, AnyTask], int] = unit_time
    processor: Callable[[int, AnyTask], float] | None = None
    flight: Callable[[Edge], int] = lambda edge: 0
    handling: Callable[[], int] = lambda: 0
    sending: int = 0
    received: Callable[[int], int] = lambda group: 0
    arguments: Callable[[int], int] = lambda group: 0
    reply: int = 0


def recorded_step(
    plan: Plan, timing: Timing | None = None, called: int = 10**9, node: str = "node"
) -> RecordedStep:
    """The record of a step in which each operation runs as early as possible; each group has one process."""
    timing, host = timing or Timing(), Host(node, "clock")
    work, keys = plan_workload(plan, Costs()), message_keys(plan)
    needed: dict[int, list[int]] = collections.defaultdict(list)
    for message, reader in enumerate(work.messages.readers):
        needed[reader].append(message)
    received = [called + timing.received(group) for group in range(work.mpmd_dim)]
    ready = [time + timing.arguments(group) for group, time in enumerate(received)]
    free, positions = list(ready), work.bounds[:-1]
    tasks: list[list[TaskTime]] = [[] for _ in free]
    waits: list[list[WaitTime]] = [[] for _ in free]
    sends: list[list[SendTime]] = [[] for _ in free]
    arrivals: dict[int, int] = {}
    queue = list(range(work.mpmd_dim))
    while queue:
        group = queue.pop()
        while (operation := positions[group]) < work.bounds[group + 1]:
            if not all(message in arrivals for message in needed[operation]):
                break
            time = free[group]
            for message in needed[operation]:
                (src, _), tag = keys[message]
                start, time = time, max(time, arrivals[message])
                waits[group].append(WaitTime(src, tag, start, time, arrivals[message]))
            task = work.tasks[operation]
            if not isinstance(task, Instant):
                time += timing.handling()
                start, time = time, time + timing.duration(group, task)
                share = timing.processor and timing.processor(group, task)
                used = None if share is None else int((time - start) * share)
                tasks[group].append(TaskTime(task, start, time, used))
            for message in range(work.sends[operation], work.sends[operation + 1]):
                edge, tag = keys[message]
                sends[group].append(SendTime(edge[1], tag, time, time + timing.sending))
                arrivals[message] = time + timing.flight(edge)
                time += timing.sending
                queue.append(edge[1])
            free[group], positions[group] = time, operation + 1
    assert positions == work.bounds[1:], "the plan gets stuck"
    replied = [time + timing.handling() for time in free]
    processes = tuple(
        ProcessTimes(
            mpmd_idx=group,
            rank=0,
            host=host,
            received=received[group],
            ready=ready[group],
            finished=free[group],
            replied=replied[group],
            tasks=tuple(tasks[group]),
            waits=tuple(waits[group]),
            sends=tuple(sends[group]),
        )
        for group in range(work.mpmd_dim)
    )
    return RecordedStep(host, called, max(replied) + timing.reply, processes)


def recovered(step: RecordedStep) -> RecordedStep:
    """The step as it would be if groups had been replaced for 60 s after its call."""
    delay = 60 * 10**9
    processes = tuple(times.shifted(delay) for times in step.processes)
    return dataclasses.replace(step, returned=step.returned + delay, processes=processes, is_recovered=True)


def matched_steps(plan: Plan, *timings: Timing) -> tuple[MatchedStep, ...]:
    """Steps of one process per group, by the driver's clock."""
    steps = [recorded_step(plan, timing, (i + 1) * 10**9) for i, timing in enumerate(timings)]
    return tuple(match(step, lambda edge, tag, rank: (0,)) for step in steps)


def matched_simulation(plan: Plan, simulation: Simulation) -> MatchedStep:
    """A simulation of one step of a plan, as if it had been recorded: its unit of time is a second."""
    (times,), work = simulation.times, simulation.workload
    keys = message_keys(plan)

    def at(time: float) -> int:
        return round(time * 1e9)

    processes = []
    for group in range(work.mpmd_dim):
        operations = work.operations(group)
        waits = []
        for operation in operations:
            free = times.end(operation - 1) if operation > operations[0] else 0.0
            for message, reader in enumerate(work.messages.readers):
                if reader == operation:
                    came = times.arrivals[message]
                    waits.append(
                        WaitTime(
                            keys[message][0][0], keys[message][1], *map(at, (free, max(free, came), came))
                        )
                    )
        processes.append(
            ProcessTimes(
                mpmd_idx=group,
                rank=0,
                host=Host("node", "clock"),
                received=0,
                ready=0,
                finished=at(times.group_ends[group]),
                replied=at(times.group_ends[group]),
                tasks=tuple(
                    TaskTime(task, at(times.starts[i]), at(times.end(i)))
                    for i in operations
                    if not isinstance(task := work.tasks[i], Instant)
                ),
                waits=tuple(waits),
                sends=tuple(
                    SendTime(edge[1], tag, end, end)
                    for message, (edge, tag) in enumerate(keys)
                    if edge[0] == group
                    for end in [at(times.end(work.messages.senders[message]))]
                ),
            )
        )
    return MatchedStep(at(simulation.makespan), tuple(processes), {})
