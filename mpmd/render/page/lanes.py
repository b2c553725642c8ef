"""The columns of the timelines: tasks, gaps with their causes, simulated times, and the critical path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpmd.attribution.gaps import Causes, IdleSpan
from mpmd.ir.plan import OutsideTask
from mpmd.render.page.palette import SIMULATED
from mpmd.render.page.schema import GroupData, PathData, SimulationData
from mpmd.render.page.subject import Subject
from mpmd.simulate.workload import StepTimes

BUSY_SPANS = 400


def simulations_data(subject: Subject, steps: Sequence[StepTimes[int]]) -> list[SimulationData]:
    """The simulated steps; tasks of one type take the same time in them."""
    firsts = [operations[0] for operations in subject.types.values()]
    return [
        SimulationData(
            label=label,
            hint=hint,
            makespan=step.makespan,
            took=[int(step.durations[i]) for i in firsts],
        )
        for (label, hint), step in zip(SIMULATED.items(), steps, strict=True)
    ]


def groups_data(subject: Subject, simulated: Sequence[StepTimes[int]]) -> list[GroupData]:
    gaps: list[dict[int, IdleSpan]] = [{} for _ in subject.tasks]
    for gap in subject.attribution.gaps:
        gaps[gap.group][gap.after] = gap
    return [_group_data(subject, group, gaps[group], simulated) for group in subject.measured.groups]


def _group_data(
    subject: Subject,
    group: int,
    gaps: dict[int, IdleSpan],
    simulated: Sequence[StepTimes[int]],
) -> GroupData:
    measured, operations = subject.measured, subject.tasks[group]
    took = [measured.durations[i] for i in operations]
    processor = [measured.processor[i] for i in operations]
    rows = [gaps.get(i) for i in (*operations, -1)]
    culprits = [gap.culprits[0] if gap and gap.culprits else None for gap in rows]
    totals = subject.attribution.by_group[group]
    return GroupData(
        type=[subject.places[i] for i in operations],
        microbatch=[_microbatch(subject, i) for i in operations],
        names=_names(subject, operations),
        took=took,
        processor=processor if any(time is not None for time in processor) else [],
        idle=_idle([measured.starts[i] for i in operations], took, measured.returned),
        causes=[
            [getattr(gap.causes, cause) if gap else 0 for gap in rows] if getattr(totals, cause) else []
            for cause in Causes._fields
        ],
        waited=[subject.number(gap.waited) if gap else -1 for gap in rows],
        culprit=[subject.number(culprit.operation) if culprit else -1 for culprit in culprits],
        culprit_cause=[Causes._fields.index(culprit.cause) if culprit else -1 for culprit in culprits],
        after=[subject.number(subject.attribution.links[i].parent) for i in operations],
        simulated=[
            _idle([step.starts[i] for i in operations], [step.durations[i] for i in operations])
            for step in simulated
        ],
    )


def _idle(starts: Sequence[int], took: Sequence[int], end: int | None = None) -> list[int]:
    """Returns the idle time before each task, and before ``end``: mostly zeros, shorter text than starts."""
    ends = [start + time for start, time in zip(starts, took, strict=True)]
    begins = [*starts, *([] if end is None else [end])]
    return [begin - before for begin, before in zip(begins, [0, *ends], strict=False)]


def _microbatch(subject: Subject, operation: int) -> int:
    task = subject.task(operation)
    return -1 if isinstance(task, OutsideTask) else task.tasks[0].microbatch


def _names(subject: Subject, operations: Sequence[int]) -> dict[int, str]:
    """Names cells of several tasks, such as ``fwd_3__1 + bwd_3__0``, by their place among ``operations``."""
    tasks = ((k, subject.task(operation)) for k, operation in enumerate(operations))
    cells = ((k, task.tasks) for k, task in tasks if not isinstance(task, OutsideTask))
    return {k: " + ".join(map(str, members)) for k, members in cells if len(members) > 1}


def busy_shares(subject: Subject) -> list[float]:
    measured = subject.measured
    edges = np.linspace(0, measured.returned, BUSY_SPANS + 1)
    busy = np.zeros(BUSY_SPANS)
    for operations in subject.tasks:
        times = np.array([(measured.starts[i], measured.end(i)) for i in operations]).reshape(-1)
        if times.size:
            took = (times[1::2] - times[::2]).cumsum()
            until = np.column_stack([np.concatenate([[0], took[:-1]]), took]).reshape(-1)
            busy += np.diff(np.interp(edges, times, until))
    whole = measured.returned / BUSY_SPANS * len(subject.tasks)
    return [round(float(share), 3) for share in busy / (whole or 1)]


def path_data(subject: Subject) -> PathData:
    tasks = [
        (subject.number(segment.operation), segment.start, segment.end)
        for segment in subject.attribution.critical_path
        if segment.kind == "task"
    ]
    task, start, end = (list(column) for column in zip(*tasks, strict=True)) if tasks else ([], [], [])
    return PathData(task=task, start=start, end=end)
