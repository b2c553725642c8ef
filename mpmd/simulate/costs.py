"""How long tasks and messages take."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from mpmd.ir import Cell, TaskKind, parse_cell
from mpmd.timeline import Event

Edge = tuple[int, int]
"""Source and destination group."""

TaskType = tuple[TaskKind, int]
"""The kind and the stage of a task: what tells how long it takes."""

UNITS: Mapping[TaskKind, float] = {"fwd": 1, "bwd": 2, "bwdA": 1, "bwdW": 1}
"""How long tasks take if nothing else is said."""


@dataclasses.dataclass(frozen=True)
class Link:
    """An edge between two groups: a message arrives ``latency + bytes / bandwidth`` after it left.

    Messages leave one after another: the next one when all bytes of the one before have left.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise ValueError(f"a link needs latency >= 0 and bandwidth > 0, got {self}")


@dataclasses.dataclass(frozen=True)
class Costs:
    """What tasks and messages cost, in any unit of time; a bandwidth is in bytes per that unit.

    A task's time is that of its kind and stage in ``tasks``, else that of its kind in ``kinds``. A fused
    cell takes the time in ``fused``, which its members share in proportion to their own times, else the
    sum of those.

    Attributes:
      kinds: the time of a task by its kind.
      tasks: the time of a task by its kind and stage.
      fused: the time of a fused cell by its members' kinds and stages.
      outside: the time of a plan's work outside the loop, by group and label; what is not there takes none.
      link: every edge between groups. Within a group messages are free.
      links: the edges that differ from ``link``.
      message_bytes: size of an activation or gradient in a schedule. A plan knows the sizes of its own.
      blocking: a group that sends does nothing else until its message has arrived, for which the receiver is
        always ready. Otherwise the sender goes on at once, and only the link is busy.
      atomic: a schedule's fused cell starts when it has all that its members need from elsewhere, and its
        results are there when it ends; otherwise its members run one after another, each as soon as it can.
        A plan's cells are executables, and always atomic.
      held_for_bwdw: the part of a forward's residuals that ``bwdA`` leaves for ``bwdW`` to release.

    Raises ``ValueError`` for a negative time.
    """

    kinds: Mapping[TaskKind, float] = dataclasses.field(default_factory=lambda: dict(UNITS))
    tasks: Mapping[TaskType, float] = dataclasses.field(default_factory=dict)
    fused: Mapping[tuple[TaskType, ...], float] = dataclasses.field(default_factory=dict)
    outside: Mapping[tuple[int, str], float] = dataclasses.field(default_factory=dict)
    link: Link = Link()
    links: Mapping[Edge, Link] = dataclasses.field(default_factory=dict)
    message_bytes: float = 1.0
    blocking: bool = False
    atomic: bool = False
    held_for_bwdw: float = 1.0

    def __post_init__(self) -> None:
        tables = (self.kinds, self.tasks, self.fused, self.outside)
        negative = [f"{key}: {time}" for table in tables for key, time in table.items() if time < 0]
        if negative:
            raise ValueError(f"a time is at least 0, got {', '.join(negative)}")

    @staticmethod
    def measured(events: Iterable[Event]) -> Costs:
        """The median times of measured events, of one step or several. Messages are free.

        Members of fused cells that were never measured alone get their share of the cell's time, in
        proportion to ``UNITS``. A kind gets the median over its stages, so that the costs fit another
        assignment of stages to groups too.
        """
        cells: dict[tuple[TaskType, ...], list[float]] = collections.defaultdict(list)
        outside: dict[tuple[int, str], list[float]] = collections.defaultdict(list)
        for event in events:
            if cell := cell_of(event.label):
                cells[types_of(cell)].append(event.duration)
            elif not event.label.startswith("wait"):
                outside[event.mpmd_idx, event.label].append(event.duration)
        times = {types: statistics.median(durations) for types, durations in cells.items()}
        fused = Costs(fused={types: time for types, time in times.items() if len(types) > 1})
        tasks: dict[TaskType, float] = {}
        for types in fused.fused:
            tasks |= zip(types, fused.share(types, [UNITS[kind] for kind, _ in types]), strict=True)
        tasks |= {types[0]: time for types, time in times.items() if len(types) == 1}
        kinds: dict[TaskKind, list[float]] = collections.defaultdict(list)
        for (kind, _), time in tasks.items():
            kinds[kind].append(time)
        return dataclasses.replace(
            fused,
            kinds={kind: statistics.median(of_stages) for kind, of_stages in kinds.items()},
            tasks=tasks,
            outside={key: statistics.median(durations) for key, durations in outside.items()},
        )

    def link_of(self, edge: Edge) -> Link:
        """The link from one group to another, or within a group."""
        return Link() if edge[0] == edge[1] else self.links.get(edge, self.link)

    def times(self, types: Iterable[TaskType]) -> dict[TaskType, float]:
        """The time of each type of task. Raises ``ValueError`` naming those of which none is known."""
        known = {(kind, stage): self.tasks.get((kind, stage), self.kinds.get(kind)) for kind, stage in types}
        unknown = sorted(f"{kind}_{stage}" for (kind, stage), time in known.items() if time is None)
        if unknown:
            where = "give it in Costs.kinds or Costs.tasks"
            raise ValueError(f"no time is known of {', '.join(unknown)}; {where}")
        return {key: time for key, time in known.items() if time is not None}

    def share(self, types: Sequence[TaskType], alone: Sequence[float]) -> list[float]:
        """The times of a cell's members, given the times they have alone."""
        whole, total = self.fused.get(tuple(types)), sum(alone)
        if whole is None:
            return list(alone)
        return [whole * time / total if total else whole / len(alone) for time in alone]


def cell_of(label: str) -> Cell | None:
    """The cell that a label is the text of; ``None`` for work outside the loop and for waits."""
    try:
        return parse_cell(label)
    except ValueError:
        return None


def types_of(cell: Cell) -> tuple[TaskType, ...]:
    """The kinds and stages of a cell's tasks."""
    return tuple((task.kind, task.stage) for task in cell.tasks)
