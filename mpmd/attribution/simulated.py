"""The causes of the idle times of a simulated step, by the same rules as of a measured one.

A simulation is a step without handling, driver and late begin; groups that block while they send, handle
their messages, and what groups lose by sharing cores is jitter. ``Simulation.gaps`` names whom a group waits
for, which needs no more than the simulation; causes are relative to an ideal schedule, so that a reader of
simulations divides them. ``gap_text`` has both in one text.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from mpmd.attribution.attribution import Attribution, attribute
from mpmd.attribution.measured import Measured, Receipt
from mpmd.ir.plan import AnyTask, LoopStages
from mpmd.simulate import Simulation
from mpmd.simulate.workload import Instant, MessageTable, StepTimes, Workload

TICKS = 10**9
"""The parts of a simulation's unit of time that are counted; nanoseconds, if its unit is a second."""


def attribute_simulation(simulation: Simulation, loops: Sequence[LoopStages] = ()) -> Attribution:
    """The causes of the idle times of a simulation of one step, in billionths of its unit of time.

    Args:
      loops: those of the plan, if it is one of several loops.

    Raises: ``ValueError`` for a simulation of several steps.
    """
    if len(simulation.times) != 1:
        raise ValueError(
            f"the causes of idle times are those of one step, and {len(simulation.times)} are simulated"
        )
    (times,) = simulation.times
    return attribute(_measured(simulation.workload, times, tuple(loops)))


def _measured(workload: Workload, times: StepTimes, loops: tuple[LoopStages, ...]) -> Measured:
    framed, numbers = _framed(workload)
    starts, ends = [0] * len(framed.tasks), [0] * len(framed.tasks)
    for operation, number in enumerate(numbers):
        starts[number] = _ticks(times.starts[operation])
        ends[number] = _ticks(times.starts[operation] + times.durations[operation])
    for group in range(framed.mpmd_dim):
        last = framed.bounds[group + 1] - 1
        starts[last] = ends[last] = max(ends[last], ends[last - 1], _ticks(times.ends[group]))
    receipts: list[list[Receipt]] = [[] for _ in framed.tasks]
    arrivals = list(map(_ticks, times.arrivals))
    for message in sorted(range(len(arrivals)), key=arrivals.__getitem__):
        reader = framed.messages.readers[message]
        if reader >= 0:
            of_reader, arrived = receipts[reader], arrivals[message]
            free = of_reader[-1].end if of_reader else ends[reader - 1]
            end = min(max(free, arrived), starts[reader])
            of_reader.append(Receipt(message, free, end, arrived))
    return Measured(
        workload=framed,
        loops=loops,
        starts=tuple(starts),
        ends=tuple(ends),
        processor=(None,) * len(starts),
        receipts=tuple(map(tuple, receipts)),
        sent=tuple(ends[sender] for sender in framed.messages.senders),
        received=(0,) * framed.mpmd_dim,
        returned=max(ends, default=0),
        at_once=workload.costs.at_once,
        loads=workload.costs.loads,
    )


def _ticks(time: float) -> int:
    return round(time * TICKS)


def _framed(workload: Workload) -> tuple[Workload, list[int]]:
    """The workload with an operation for the begin and one for the end of each group's step, as plans have.

    Returns: the workload, and the number in it of each operation.
    """
    tasks: list[AnyTask | Instant] = []
    numbers: list[int] = []
    bounds = [0]
    for group in range(workload.mpmd_dim):
        operations = workload.operations(group)
        is_framed = bool(operations) and isinstance(workload.tasks[operations[0]], Instant)
        tasks += [] if is_framed else [Instant("the begin of the step")]
        numbers += range(len(tasks), len(tasks) + len(operations))
        tasks += [workload.tasks[operation] for operation in operations]
        tasks += [] if is_framed else [Instant("the end of the step")]
        bounds.append(len(tasks))
    messages = workload.messages
    framed = MessageTable(
        edges=messages.edges,
        edge_numbers=messages.edge_numbers,
        nbytes=messages.nbytes,
        senders=[numbers[sender] for sender in messages.senders],
        readers=[numbers[reader] if reader >= 0 else -1 for reader in messages.readers],
    )
    nothing, durations = [0.0] * len(tasks), [0.0] * len(tasks)
    for number, time in zip(numbers, workload.durations, strict=True):
        durations[number] = _ticks(time)
    return (
        dataclasses.replace(
            workload,
            bounds=bounds,
            tasks=tasks,
            durations=durations,
            at_start=nothing,
            at_end=list(itertools.repeat((), len(tasks))),
            messages=framed,
        ),
        numbers,
    )
