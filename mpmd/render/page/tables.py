"""The sections of a page with their tables: idle time, critical path, scenarios, memory, tasks, and so on."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Sequence

from mpmd.attribution.gaps import Causes, IdleSpan
from mpmd.attribution.ideal import members_alone
from mpmd.attribution.model import flight_times
from mpmd.attribution.scenarios import Scenario
from mpmd.ir.plan import OutsideTask, Plan, TaskType
from mpmd.ir.stack import layers_of
from mpmd.render.page.palette import CAUSES, OUTSIDE, SEGMENTS
from mpmd.render.page.schema import Amount, MemoryData, PageTable, Section, TypeData
from mpmd.render.page.subject import Subject
from mpmd.render.style import colour_of
from mpmd.simulate.costs import types_of
from mpmd.util.grouping import grouped
from mpmd.util.tables import numbers_text

LONGEST_GAPS = 12

PATH_TYPES = 15

FOLDED_SHARE = 0.005
"""The share of the step below which the savings of a scenario are folded."""


def section(title: str, *tables: PageTable, notes: Sequence[str] = ()) -> Section:
    return Section(id=title.partition(" ")[0].lower(), title=title, notes=notes, tables=tables)


def sections_data(
    subject: Subject, types: Sequence[TypeData], memory: MemoryData | None
) -> Iterator[Section]:
    yield section("Idle time", _idle_table(subject), *_longest_gaps(subject))
    path = "The tasks and waits that the end of the step came after, back to its beginning, without a hole."
    yield section("Critical path", _path_parts(subject), _path_types(subject, types), notes=[path])
    yield section("What if", *_scenarios(subject))
    if memory:
        yield section("Memory", _memory_table(memory))
    yield section("Tasks", _tasks_table(subject, types))
    yield section("Messages", _messages_table(subject))
    yield section("Stages", _stages_table(subject))
    yield section("Processes", _processes_table(subject))
    if any(subject.compile_seconds.values()):
        yield section("Compiling", _compile_table(subject))


def _idle_table(subject: Subject) -> PageTable:
    by_group, total = subject.attribution.by_group, subject.attribution.total
    shown = [name for name in Causes._fields if getattr(total, name)]
    return PageTable(
        "Idle time of each group by its cause; the causes add up to it exactly",
        {"Group": "count", "Idle": "time", "Of the step": "share", "By cause": "time_stack"}
        | {CAUSES[name]["label"]: "time" for name in shown},
        [
            (
                group,
                sum(causes),
                sum(causes) / (subject.measured.returned or 1),
                causes,
                *(getattr(causes, name) or None for name in shown),
            )
            for group, causes in enumerate(by_group)
        ],
        foot=("All", sum(total), None, None, *(getattr(total, name) for name in shown)),
        parts=list(CAUSES.values()),
    )


def _longest_gaps(subject: Subject) -> Iterator[PageTable]:
    gaps = sorted(subject.attribution.gaps, key=_beyond_fill, reverse=True)[:LONGEST_GAPS]
    rows = []
    for gap in filter(_beyond_fill, gaps):
        operations, beyond = subject.tasks[gap.group], gap.causes._replace(fill=0)._asdict()
        place = operations.index(gap.after) if gap.after >= 0 else len(operations)
        largest = key_of(CAUSES[max(beyond, key=beyond.__getitem__)])
        waited = None if gap.waited < 0 else subject.number(gap.waited)
        times = gap.end - gap.start, _beyond_fill(gap)
        rows.append((gap.group, subject.number(gap.after), *times, largest, waited, (gap.group, place)))
    if rows:
        yield PageTable(
            "The longest gaps: those with the most idle time beyond the fill of the schedule",
            {"Group": "count", "Before": "task", "Idle": "time", "Beyond fill": "time"}
            | {"Most of that": "key", "Waited for": "task", "": "gap"},
            rows,
        )


def _beyond_fill(gap: IdleSpan) -> int:
    return gap.end - gap.start - gap.causes.fill


def key_of(part: Amount) -> tuple[str, str, str]:
    return part["label"], part["colour"], part["dark"]


def _path_parts(subject: Subject) -> PageTable:
    totals = collections.Counter[str]()
    for segment in subject.attribution.critical_path:
        totals[segment.kind] += segment.end - segment.start
    length = totals.total() or 1
    return PageTable(
        "Parts of the critical path",
        {"Part": "key", "Sum": "time", "Of the step": "share", "": "bar"},
        [
            (key_of(part), totals[kind], totals[kind] / length, totals[kind])
            for kind, part in SEGMENTS.items()
            if totals[kind]
        ],
        foot=("Step", totals.total(), None, None),
    )


def _path_types(subject: Subject, types: Sequence[TypeData]) -> PageTable:
    times = grouped(
        (subject.places[segment.operation], segment.end - segment.start)
        for segment in subject.attribution.critical_path
        if segment.kind == "task"
    )
    length = subject.measured.returned or 1
    return PageTable(
        "Tasks on the critical path",
        {"Task": "key", "Group": "count", "Times": "count", "Sum": "time", "Of the step": "share", "": "bar"},
        [
            (*_type_cells(types[place]), len(of_type), sum(of_type), sum(of_type) / length, sum(of_type))
            for place, of_type in sorted(times.items(), key=lambda row: -sum(row[1]))[:PATH_TYPES]
        ],
    )


def _type_cells(of_type: TypeData) -> tuple[tuple[str, str, str], int]:
    return (of_type["label"], of_type["colour"], of_type["colour"]), of_type["group"]


def _scenarios(subject: Subject) -> Iterator[PageTable]:
    unchanged, *changed = subject.analysis.scenarios
    whole = unchanged.makespan or 1
    share = unchanged.makespan / (subject.measured.returned or 1)
    meaning = f"the measured step as the simulator has it: {share:.1%} of its length"
    first = Scenario("nothing changed", "", meaning, unchanged.makespan, 0)
    notable = [each for each in changed if each.saves >= FOLDED_SHARE * whole]
    rest = [each for each in changed if each.saves < FOLDED_SHARE * whole]
    yield _scenario_table("Steps that the simulator gives, with one thing changed", [first, *notable], whole)
    if rest:
        folded = f"{len(rest)} more that save less than {FOLDED_SHARE:.1%}"
        yield _scenario_table("Changes that save next to nothing", rest, whole, folded)


def _scenario_table(
    caption: str, scenarios: Sequence[Scenario], whole: int, folded: str | None = None
) -> PageTable:
    return PageTable(
        caption,
        {"If": "text", "The step takes": "time", "": "bar", "Saves": "share", "Meaning": "sentence"},
        [
            (capitalized(each.name), each.makespan, each.makespan, each.saves / whole or None, each.text)
            for each in scenarios
        ],
        folded=folded,
    )


def capitalized(text: str) -> str:
    """The text with a capital letter, unless it begins with the name of a task."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


def _memory_table(memory: MemoryData) -> PageTable:
    kinds, rows = memory["kinds"], memory["rows"]
    shown = [place for place in range(len(kinds)) if any(row[place] for row in rows)]
    cells = []
    for group, of_group in enumerate(memory["groups"]):
        peak, task = rows[of_group["row"][of_group["peak"]]], of_group["task"]
        bytes_of_kinds = (peak[place] or None for place in shown)
        cells.append((group, sum(peak), peak, None if task < 0 else task, *bytes_of_kinds))
    return PageTable(
        "Bytes on each device at the peak of each group",
        {"Group": "count", "Peak": "bytes", "Its parts": "bytes_stack", "During": "task"}
        | {kinds[place]["label"]: "bytes" for place in shown},
        cells,
        parts=kinds,
    )


def types_data(subject: Subject) -> list[TypeData]:
    stages: dict[int, set[int]] = collections.defaultdict(set)
    for group, types in subject.types:
        if not isinstance(types, OutsideTask):
            stages[group].update(stage for _, stage in types)
    last = max(len(subject.tasks) - 1, 1)
    return [
        TypeData(
            label=str(types) if isinstance(types, OutsideTask) else " + ".join(map(str, types)),
            group=group,
            colour=_colour(types, sorted(stages[group]), group / last),
            count=len(operations),
            median=subject.median(operations[0]),
            sum=sum(map(subject.measured.durations.__getitem__, operations)),
            sources=subject.sources_of((group, types)),
        )
        for (group, types), operations in subject.types.items()
    ]


def _colour(types: OutsideTask | tuple[TaskType, ...], stages: Sequence[int], along: float) -> str:
    if isinstance(types, OutsideTask):
        return OUTSIDE
    kind, stage = types[-1]
    parts = colour_of(kind, stages.index(stage), len(stages), along)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _tasks_table(subject: Subject, types: Sequence[TypeData]) -> PageTable:
    durations = subject.measured.durations
    times = [sorted(durations[i] for i in operations) for operations in subject.types.values()]
    busy = sum(each["sum"] for each in types) or 1
    return PageTable(
        "Tasks by their type, the largest sum first; only medians are over all recorded steps",
        {"Task": "key", "Group": "count", "Count": "count", "Median": "time", "95th percentile": "time"}
        | {"Longest": "time", "Sum": "time", "Share": "share", "Runs": "code"},
        [
            (
                *_type_cells(each),
                each["count"],
                each["median"],
                percentile(of_type, 0.95),
                of_type[-1],
                each["sum"],
                each["sum"] / busy,
                each["sources"],
            )
            for each, of_type in zip(types, times, strict=True)
        ],
        sorted=6,
    )


def percentile(ascending: Sequence[int], share: float) -> int:
    """The least value that at least ``share`` of all values do not exceed."""
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)]


def _messages_table(subject: Subject) -> PageTable:
    measured, messages = subject.measured, subject.measured.workload.messages
    flights = flight_times(measured)
    sizes = grouped(
        (measured.workload.edge(message), nbytes) for message, nbytes in enumerate(messages.nbytes)
    )
    totals = {edge: round(sum(of_edge)) for edge, of_edge in sizes.items()}
    return PageTable(
        "Messages between groups in one step" if sizes else "The groups send no messages",
        {"Groups": "text", "Bytes": "bytes", "": "bar", "Messages": "count", "In flight, median": "time"},
        [
            (f"{edge[0]} to {edge[1]}", totals[edge], totals[edge], len(sizes[edge]), flights.get(edge))
            for edge in sorted(sizes, key=lambda edge: (-totals[edge], edge))
        ],
    )


def _processes_table(subject: Subject) -> PageTable:
    step = subject.analysis.step
    return PageTable(
        "Processes: when each had the request, had the arguments, had run its last task, and had replied",
        {"Group": "count", "Process": "count", "Node": "text", "Cores": "count", "Request": "time"}
        | {"Ready": "time", "Finished": "time", "Replied": "time", "Error of its clock": "time"},
        [
            (
                process.mpmd_idx,
                process.rank,
                process.host.name,
                len(process.host.cores) or None,
                process.received,
                process.ready,
                process.finished,
                process.replied,
                step.errors.get(process.host.clock, 0),
            )
            for process in step.processes
        ],
    )


def _compile_table(subject: Subject) -> PageTable:
    times = {phase: round(1e9 * seconds) for phase, seconds in subject.compile_seconds.items()}
    return PageTable(
        "Phases of compiling",
        {"Phase": "text", "Time": "time", "": "bar"},
        [(phase, time, time) for phase, time in times.items()],
        foot=("All", sum(times.values()), None),
    )


def stage_layers(plan: Plan) -> dict[int, set[int]]:
    """Returns the layers of each stage: the rows of stacked arguments that the stage's tasks read."""
    layers = {leaf.name: rows for leaf in plan.inputs if leaf.name and (rows := layers_of(leaf.name))}
    of_stage: dict[int, set[int]] = collections.defaultdict(set)
    for program in plan.programs:
        for run in program.runs:
            stages = () if isinstance(run.task, OutsideTask) else {stage for _, stage in types_of(run.task)}
            if len(stages) == 1:
                of_stage[min(stages)].update(*(layers[name] for name in run.inputs if name in layers))
    return of_stage


def _stages_table(subject: Subject) -> PageTable:
    plan, layers = subject.analysis.plan, stage_layers(subject.analysis.plan)
    medians, groups = {}, collections.defaultdict(set)
    sources: dict[int, dict[str, None]] = collections.defaultdict(dict)
    for (group, types), operations in subject.types.items():
        if isinstance(types, OutsideTask):
            continue
        medians[types] = subject.median(operations[0])
        stages = {stage for _, stage in types}
        for stage in stages:
            groups[stage].add(group)
        if len(stages) == 1:
            sources[types[0].stage] |= dict.fromkeys(subject.sources_of((group, types)))
    times = sorted(members_alone(medians).items(), key=lambda item: (item[0].stage, item[0].kind))
    rows = []
    for stage, of_stage in itertools.groupby(times, key=lambda item: item[0].stage):
        tasks = dict(of_stage)
        time, names = sum(tasks.values()), ", ".join(map(str, tasks))
        texts = numbers_text(sorted(groups[stage])), time, time, numbers_text(sorted(layers.get(stage, ())))
        rows.append((plan.stage_text(stage), *texts, names, list(sources[stage])))
    return PageTable(
        "Stages, with the functions that do most of their work",
        {"Stage": "text", "Group": "text", "Time of a microbatch": "time", "": "bar", "Layers": "text"}
        | {"Tasks": "text", "Runs": "code"},
        rows,
    )
