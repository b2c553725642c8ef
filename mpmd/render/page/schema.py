"""The data of a page, as its JavaScript reads it.

Python computes all of it, and the scripts only draw. Times are whole nanoseconds since the driver's call, so
that sums are exact, in JavaScript, too; sizes are bytes, shares are from 0 to 1. Tasks are numbered through
all groups, in the order in which each group runs them; -1 stands for no task.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class Fact(TypedDict):
    """A figure of a step; ``unit`` says how it is written."""

    label: str
    value: float | str
    unit: Literal["time", "count", "bytes", "share", "text"]


class FindingData(TypedDict):
    """A sentence, the part of the step that it would save, and the number of a task to show; -1 for none."""

    text: str
    saves: float
    task: int


class Part(TypedDict):
    """A cause of idle time, a kind of segment or a purpose of memory, with the sum over the step.

    ``gloss`` explains the label in a few words, ``meaning`` in a sentence; ``dark`` is the colour on a dark
    page.
    """

    key: str
    label: str
    gloss: str
    meaning: str
    colour: str
    dark: str
    total: int


class TypeData(TypedDict):
    """Tasks that should take equally long: their name, statistics, and the user's lines that they run."""

    label: str
    group: int
    colour: str
    count: int
    median: int
    p95: int
    longest: int
    total: int
    sources: list[str]


class GroupData(TypedDict):
    """A group's tasks and the gaps before them, as columns; the last gap is that before the step's end.

    Attributes:
      type: of each task, the place among the types.
      microbatch: of each task; -1 outside the loops.
      names: those of tasks whose name is not ``label__microbatch``, by place.
      took: how long each task ran.
      processor: the processor time of each task, of all threads; empty where it is unknown.
      idle: the length of the gap before each task, and of the last one.
      causes: for each cause, the time of each gap; empty where all are 0.
      waited: for each gap, the number of the task that was waited for.
      culprit, culprit_cause: for each gap, the task to blame for most of it, and the place of that cause.
      after: of each task, the number of the task that it really started after.
      simulated: for each simulation, the idle time before each task.
      idle_total, cause_totals: the sums.
    """

    type: list[int]
    microbatch: list[int]
    names: dict[int, str]
    took: list[int]
    processor: list[int | None]
    idle: list[int]
    causes: list[list[int]]
    waited: list[int]
    culprit: list[int]
    culprit_cause: list[int]
    after: list[int]
    simulated: list[list[int]]
    idle_total: int
    cause_totals: list[int]


class SimulationData(TypedDict):
    """A simulated step; ``took`` has the time of each type of task."""

    label: str
    meaning: str
    makespan: int
    took: list[int]


class PathType(TypedDict):
    """The tasks of one type on the critical path."""

    type: int
    count: int
    total: int


class PathData(TypedDict):
    """The critical path as columns, in the order of time; ``kind`` is a place among ``kinds``, 0 a task."""

    kinds: list[Part]
    kind: list[int]
    task: list[int]
    start: list[int]
    end: list[int]
    types: list[PathType]


class WaitData(TypedDict):
    """A long gap: the ``k``-th of a group, its part beyond the fill, and the largest cause of that."""

    group: int
    k: int
    length: int
    beyond_fill: int
    cause: int
    waited: int


class ScenarioData(TypedDict):
    """A simulated step with one thing changed, and the part of the step that this saves."""

    name: str
    meaning: str
    makespan: int
    saves: float


class PeakData(TypedDict):
    """The most bytes that a group holds: when, the place of its parts among the rows, and the task."""

    time: int
    bytes: int
    row: int
    task: int


class GroupMemoryData(TypedDict):
    """The memory of a group: the time from each change to the next one, and the row of bytes from then on."""

    steps: list[int]
    row: list[int]
    peak: PeakData


class MemoryData(TypedDict):
    """The memory of all groups; a row has the bytes of each kind. ``note`` says what was left out."""

    kinds: list[Part]
    rows: list[list[int]]
    groups: list[GroupMemoryData]
    note: str | None


class EdgeData(TypedDict):
    """The messages from a group to another; ``flight`` is their median time in flight, if they had any."""

    src: int
    dst: int
    bytes: int
    count: int
    flight: int | None


class StageData(TypedDict):
    """A stage: the groups that run it, its time for one microbatch, its tasks, and the user's lines.

    ``layers`` are those of stacked arguments that it reads, as in ``0 to 3``; empty where layers are no scan.
    """

    label: str
    groups: list[int]
    time: int
    tasks: list[str]
    layers: list[str]
    sources: list[str]


class ProcessData(TypedDict):
    """A process of a group: its node, the number of cores that it may use (0: unknown), and its step.

    ``received``, ``ready``, ``finished`` and ``replied`` are as in ``ProcessTimes``, ``error`` is that of its
    clock.
    """

    group: int
    rank: int
    node: str
    cores: int
    received: int
    ready: int
    finished: int
    replied: int
    error: int


class ProfileData(TypedDict):
    """One measured step. ``busy`` has the share of groups that run a task, in equal spans of the step."""

    name: str
    makespan: int
    idle: int
    facts: list[Fact]
    findings: list[FindingData]
    causes: list[Part]
    types: list[TypeData]
    groups: list[GroupData]
    busy: list[float]
    simulations: list[SimulationData]
    path: PathData
    waits: list[WaitData]
    scenarios: list[ScenarioData]
    memory: MemoryData | None
    edges: list[EdgeData]
    stages: list[StageData]
    processes: list[ProcessData]
    compile: list[tuple[str, float]]


class ChangedPart(TypedDict):
    """A part of the step, as the mean over the groups, in nanoseconds."""

    label: str
    colour: str
    dark: str
    before: float
    after: float


class ChangedType(TypedDict):
    """A type of task: its medians, ``None`` where a step has none, and its sums."""

    label: str
    group: int
    before: int | None
    after: int | None
    sum_before: int
    sum_after: int


class ComparisonData(TypedDict):
    """The changes from one step to another; the parts of each add up to the step."""

    sentences: list[str]
    parts: list[ChangedPart]
    types: list[ChangedType]


class PageData(TypedDict):
    """A page of one step, or of two with their comparison."""

    profiles: list[ProfileData]
    comparison: ComparisonData | None
