"""The data of a page, as its JavaScript reads it.

Python computes all numbers and sentences, and the scripts only draw. Times are whole nanoseconds since the
driver's call, so that sums are exact, in JavaScript, too; sizes are bytes, shares are from 0 to 1. Tasks are
numbered through all groups, in the order in which each group runs its tasks; -1 stands for no task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict


class Amount(TypedDict):
    """A cause of idle time, a kind of segment or a purpose of memory, and its sum over the step.

    ``hint`` has its meaning and a remedy; ``dark`` is its colour on a dark page.
    """

    label: str
    hint: str
    colour: str
    dark: str
    total: int


Unit = str
"""The way in which a cell is written: as a ``"text"``, a longer ``"sentence"``, a ``"count"``, ``"time"``,
``"bytes"``, ``"share"``, ``"time_change"`` or ``"share_change"``; as a ``"bar"`` for an amount, a
``"time_stack"`` or ``"bytes_stack"`` for amounts of the table's ``parts``; as ``"code"`` for lines, a
``"key"`` for a text, its colour and its colour on a dark page, a ``"task"`` for a task's number, a ``"gap"``
for a group and the place of the task that comes after the gap."""


class PageTable(NamedTuple):
    """A table; ``None`` stands for an empty cell, and the first cell of a row is its name.

    Attributes:
      columns: the unit of each column by its title.
      foot: the last row, with sums; ``None``: a table without sums.
      parts: the parts that a ``"time_stack"`` or ``"bytes_stack"`` has amounts of.
      sorted: the place of the column by which rows descend at first; ``None``: rows stay in their order.
      folded: the text of a line that hides the table until it is clicked; ``None``: the table is shown.
    """

    caption: str
    columns: Mapping[str, Unit]
    rows: Sequence[Sequence[Any]]
    foot: Sequence[Any] | None = None
    parts: Sequence[Amount] = ()
    sorted: int | None = None
    folded: str | None = None


class Section(TypedDict):
    id: str
    title: str
    notes: Sequence[str]
    tables: Sequence[PageTable]


class Fact(NamedTuple):
    """A figure of a step; ``hint`` is its tooltip, with its meaning and a remedy."""

    label: str
    value: float | str
    unit: Unit
    hint: str = ""


class FindingData(TypedDict):
    """A sentence, the share of the step that it would save, and the number of a task to show; -1 for none."""

    text: str
    saves: float
    task: int


class TypeData(TypedDict):
    """Tasks that should take equally long: their name, number, times, and the user's lines that they run."""

    label: str
    group: int
    colour: str
    count: int
    median: int
    sum: int
    sources: list[str]


class GroupData(TypedDict):
    """A group's tasks and the gaps before them, as columns; the last gap precedes the step's end.

    Attributes:
      type: of each task, the place among the types.
      microbatch: of each task; -1 outside the loops.
      names: by place, the names of fused tasks, since ``label__microbatch`` is not theirs.
      took: how long each task ran.
      processor: the processor time of each task, of all threads; empty where it is unknown.
      idle: the length of the gap before each task, and of the last one.
      causes: for each cause, the time of each gap; empty where all are 0.
      waited: for each gap, the number of the task that was waited for.
      culprit, culprit_cause: for each gap, the task to blame for most of it, and the place of that cause.
      after: of each task, the number of the task that it really started after.
      simulated: for each simulation, the idle time before each task.
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


class SimulationData(TypedDict):
    """A simulated step; ``took`` has the time of each type of task."""

    label: str
    hint: str
    makespan: int
    took: list[int]


class PathData(TypedDict):
    """The tasks of the critical path as columns, in the order of time."""

    task: list[int]
    start: list[int]
    end: list[int]


class GroupMemoryData(TypedDict):
    """The memory of a group: the time from each change to the next one, and the row of bytes from then on.

    ``peak`` is the place of the change to the most bytes, and ``task`` the number of the task that runs then.
    """

    steps: list[int]
    row: list[int]
    peak: int
    task: int


class MemoryData(TypedDict):
    """The memory of all groups; a row has the bytes of each kind. ``note`` says which moments are shown."""

    kinds: list[Amount]
    rows: list[list[int]]
    groups: list[GroupMemoryData]
    note: str | None


class PageData(TypedDict):
    """A measured step, or the later one of two.

    Attributes:
      name: of the step, in headings.
      whole: the time of all groups together.
      parts: of ``whole``: the tasks, and the causes of idle time.
      busy: the share of groups that run a task, in equal spans of the step.
      changes: the section on what changed from an earlier step, if there is one.
      sections: the sections below the timeline.
    """

    name: str
    makespan: int
    whole: int
    facts: list[Fact]
    findings: list[FindingData]
    parts: list[Amount]
    types: list[TypeData]
    groups: list[GroupData]
    busy: list[float]
    simulations: list[SimulationData]
    path: PathData
    memory: MemoryData | None
    changes: Section | None
    sections: list[Section]
