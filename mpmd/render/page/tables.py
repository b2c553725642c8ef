"""The tables of a page: tasks by type, the critical path, messages, and stages."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from mpmd.attribution.ideal import members_alone
from mpmd.attribution.model import flight_times
from mpmd.ir.plan import Cell, Edge, OutsideTask, Plan, TaskType
from mpmd.ir.stack import layers_of
from mpmd.render.page.lanes import path_columns
from mpmd.render.page.palette import OUTSIDE, SEGMENTS
from mpmd.render.page.schema import EdgeData, PathData, PathType, ProcessData, StageData, TypeData
from mpmd.render.page.subject import Subject
from mpmd.render.style import colour_of
from mpmd.simulate.costs import types_of

PATH_TYPES = 15
"""The most types of tasks in the table of the critical path."""


def types_data(subject: Subject) -> list[TypeData]:
    """The statistics of each type of task; medians are over all recorded steps, the rest over one."""
    measured = subject.measured
    stages = _stages_of_groups(subject)
    types = []
    for key, operations in subject.types.items():
        group, _ = key
        task = subject.task(operations[0])
        times = sorted(measured.durations[i] for i in operations)
        types.append(
            TypeData(
                label=_label(task),
                group=group,
                colour=_colour(task, stages[group], group / max(len(subject.tasks) - 1, 1)),
                count=len(times),
                median=subject.median(operations[0]),
                p95=percentile(times, 0.95),
                longest=times[-1],
                total=sum(times),
                sources=list(subject.sources.get(subject.executables[key], ())),
            )
        )
    return types


def percentile(ascending: Sequence[int], share: float) -> int:
    """The least of the values that at least this share of them do not exceed."""
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)]


def _label(task: OutsideTask | Cell) -> str:
    return str(task) if isinstance(task, OutsideTask) else " + ".join(map(str, types_of(task)))


def _stages_of_groups(subject: Subject) -> list[list[int]]:
    stages: list[set[int]] = [set() for _ in subject.tasks]
    for key, operations in subject.types.items():
        task = subject.task(operations[0])
        if not isinstance(task, OutsideTask):
            stages[key[0]].update(member.stage for member in task.tasks)
    return list(map(sorted, stages))


def _colour(task: OutsideTask | Cell, stages: Sequence[int], along: float) -> str:
    if isinstance(task, OutsideTask):
        return OUTSIDE
    last = task.tasks[-1]
    parts = colour_of(last.kind, stages.index(last.stage), len(stages), along)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def path_data(subject: Subject) -> PathData:
    """The critical path, its sums by kind of segment, and the types of tasks with most of it."""
    columns = list(path_columns(subject))
    kinds = list(SEGMENTS)
    totals = collections.Counter[str]()
    by_type: dict[int, list[int]] = collections.defaultdict(list)
    type_of_task = {
        subject.number(operation): place
        for place, operations in enumerate(subject.types.values())
        for operation in operations
    }
    for kind, task, start, end in columns:
        totals[kind] += end - start
        if kind == "task" and task >= 0:
            by_type[type_of_task[task]].append(end - start)
    types = [PathType(type=place, count=len(times), total=sum(times)) for place, times in by_type.items()]
    return PathData(
        kinds=[SEGMENTS[kind].part(kind, totals[kind]) for kind in kinds],
        kind=[kinds.index(kind) for kind, *_ in columns],
        task=[task for _, task, _, _ in columns],
        start=[start for _, _, start, _ in columns],
        end=[end for *_, end in columns],
        types=sorted(types, key=lambda row: -row["total"])[:PATH_TYPES],
    )


def edges_data(subject: Subject) -> list[EdgeData]:
    """The messages of each edge, the edge with the most bytes first."""
    measured, messages = subject.measured, subject.measured.workload.messages
    flights = flight_times(measured)
    sizes: dict[Edge, list[float]] = collections.defaultdict(list)
    for message, nbytes in enumerate(messages.nbytes):
        sizes[measured.workload.edge(message)].append(nbytes)
    edges = [
        EdgeData(
            src=edge[0],
            dst=edge[1],
            bytes=round(sum(of_edge)),
            count=len(of_edge),
            flight=flights.get(edge),
        )
        for edge, of_edge in sorted(sizes.items())
    ]
    return sorted(edges, key=lambda edge: -edge["bytes"])


def processes_data(subject: Subject) -> list[ProcessData]:
    """The processes of all groups, by group and rank."""
    return [
        ProcessData(
            group=process.mpmd_idx,
            rank=process.rank,
            node=process.host.name,
            cores=len(process.host.cores),
            received=process.received,
            ready=process.ready,
            finished=process.finished,
            replied=process.replied,
            error=subject.step.errors.get(process.host.clock, 0),
        )
        for process in subject.step.processes
    ]


def stage_layers(plan: Plan) -> dict[int, list[str]]:
    """The layers of each stage, as text: those of the stacked arguments of which its tasks read a range."""
    ranges = {leaf.name: layers for leaf in plan.inputs if leaf.name and (layers := layers_of(leaf.name))}
    of_stage: dict[int, dict[str, None]] = collections.defaultdict(dict)
    for program in plan.programs:
        for run in program.runs:
            if not isinstance(run.task, OutsideTask) and len({stage for _, stage in types_of(run.task)}) == 1:
                texts = [_layers_text(ranges[name]) for name in run.inputs if name in ranges]
                of_stage[run.task.tasks[0].stage] |= dict.fromkeys(texts)
    return {stage: list(layers) for stage, layers in of_stage.items()}


def _layers_text(layers: range) -> str:
    return str(layers.start) if len(layers) == 1 else f"{layers.start} to {layers.stop - 1}"


def stages_data(subject: Subject) -> list[StageData]:
    """The stages of all loops, with what they run."""
    medians, groups = {}, collections.defaultdict(set)
    sources: dict[int, dict[str, None]] = collections.defaultdict(dict)
    for (group, types), operations in subject.types.items():
        if isinstance(types, OutsideTask):
            continue
        medians[types] = subject.median(operations[0])
        for _, stage in types:
            groups[stage].add(group)
        if len({stage for _, stage in types}) == 1:
            executable = subject.executables[group, types]
            sources[types[0][1]] |= dict.fromkeys(subject.sources.get(executable, ()))
    alone, layers = members_alone(medians), stage_layers(subject.plan)
    tasks: dict[int, list[TaskType]] = collections.defaultdict(list)
    for member in alone:
        tasks[member[1]].append(member)
    return [
        StageData(
            label=subject.plan.stage_text(stage),
            groups=sorted(groups[stage]),
            time=sum(alone[member] for member in tasks[stage]),
            tasks=[str(member) for member in sorted(tasks[stage])],
            layers=layers.get(stage, []),
            sources=list(sources[stage]),
        )
        for stage in sorted(tasks)
    ]
