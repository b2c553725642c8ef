"""The times of tasks and messages."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpmd.ir.events import Event, checked_events
from mpmd.ir.plan import Cell, Edge, OutsideTask, TaskKind, TaskType
from mpmd.util.grouping import grouped
from mpmd.validation import Fault, bool_fault, number_fault, raise_faults, refusing, type_fault

DEFAULT_TIMES: Mapping[TaskKind, float] = {"fwd": 1, "bwd": 2, "bwdA": 1, "bwdW": 1}


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection between two groups: a message arrives ``latency + bytes / bandwidth`` after it leaves.

    Messages leave one after another: a message leaves when all bytes of the message before have left.

    Raises ``ValueError`` for a negative latency, and for a bandwidth that is not positive; ``TypeError`` for
    other types.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        raise_faults(
            number_fault("latency", self.latency, least=0), number_fault("bandwidth", self.bandwidth, above=0)
        )


@refusing(loads="loads is gone: leave it out, because every group at work counts as one")
@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of tasks and messages, in any unit of time; bandwidths are in bytes per unit of time.

    A task takes the time of its kind and stage in ``tasks`` or, without an entry, the time of its kind in
    ``kinds``. A fused cell takes its time in ``fused``, divided among its members in proportion to their own
    times, or, without an entry, the sum of the members' times.

    Attributes:
      kinds: the time of a task by its kind.
      tasks: the time of a task by its kind and stage.
      fused: the time of a fused cell by its members' kinds and stages.
      outside: the time of a plan's tasks outside of loops, by group and task; tasks without an entry take no
        time.
      link: the link of every edge. Within a group messages are free.
      links: the links of the edges that differ from ``link``.
      message_bytes: the size of an activation or gradient in a schedule. A plan has the sizes of its values.
      blocking: whether a group that sends runs no task until its message has arrived; the receiver is
        always ready. Otherwise the sender goes on at once, and only the link is busy.
      atomic: whether a schedule's fused cell starts when all inputs of its members are there, and has its
        results when it ends. Otherwise its members run one after another, each as early as possible. The
        cells of a plan are executables, and always atomic.
      at_once: the number of groups that can be at work at once, each at full speed; more groups share the
        cores that they compute on.
      held_for_bwdw: the fraction of a forward's residuals that ``bwdA`` keeps, so that ``bwdW`` releases it.

    Raises ``TypeError`` for values of other types, and ``ValueError`` for a negative time, and for groups
    that share cores and block.
    """

    kinds: Mapping[TaskKind, float] = dataclasses.field(default_factory=lambda: dict(DEFAULT_TIMES))
    tasks: Mapping[TaskType, float] = dataclasses.field(default_factory=dict)
    fused: Mapping[tuple[TaskType, ...], float] = dataclasses.field(default_factory=dict)
    outside: Mapping[tuple[int, OutsideTask], float] = dataclasses.field(default_factory=dict)
    link: Link = Link()
    links: Mapping[Edge, Link] = dataclasses.field(default_factory=dict)
    message_bytes: float = 1.0
    blocking: bool = False
    atomic: bool = False
    at_once: float = math.inf
    held_for_bwdw: float = 1.0

    def __post_init__(self) -> None:
        raise_faults(*self._faults())
        if self.blocking and not math.isinf(self.at_once):
            raise ValueError("groups that share cores (at_once) do not block while they send (blocking)")

    def _faults(self) -> Iterator[Fault | None]:
        for name in ("kinds", "tasks", "fused", "outside"):
            table = getattr(self, name)
            if fault := type_fault(name, table, Mapping, "a dict of times"):
                yield fault
                continue
            for key, time in table.items():
                yield number_fault(f"{name}[{key!r}]", time, "a time", least=0)
        yield type_fault("link", self.link, Link, "a Link")
        yield type_fault("links", self.links, Mapping, "a dict of the Link of each edge")
        if isinstance(self.links, Mapping):
            for edge, link in self.links.items():
                yield type_fault(f"links[{edge!r}]", link, Link, "a Link")
        yield number_fault("message_bytes", self.message_bytes, "a number of bytes", least=0)
        yield bool_fault("blocking", self.blocking)
        yield bool_fault("atomic", self.atomic)
        yield number_fault("at_once", self.at_once, "a number of groups", above=0)
        yield number_fault("held_for_bwdw", self.held_for_bwdw, "a share", least=0)

    @staticmethod
    def measured(events: Iterable[Event]) -> Costs:
        """The median times of measured events, of one step or several. Messages are free.

        A member of a fused cell that was never measured alone gets its share of the cell's time, in
        proportion to ``DEFAULT_TIMES``. A kind gets the median over its stages, so that the costs also fit
        another placement of stages on groups.

        Raises: ``TypeError`` for items of other types than ``Event``.
        """
        events = checked_events("events", events)
        cells = grouped(
            (types_of(event.activity), event.duration) for event in events if isinstance(event.activity, Cell)
        )
        outside = grouped(
            ((event.mpmd_idx, event.activity), event.duration)
            for event in events
            if isinstance(event.activity, OutsideTask)
        )
        times = {types: statistics.median(durations) for types, durations in cells.items()}
        fused = Costs(fused={types: time for types, time in times.items() if len(types) > 1})
        tasks: dict[TaskType, float] = {}
        for types in fused.fused:
            tasks |= zip(types, fused.share(types, [DEFAULT_TIMES[kind] for kind, _ in types]), strict=True)
        tasks |= {types[0]: time for types, time in times.items() if len(types) == 1}
        kinds = grouped((kind, time) for (kind, _), time in tasks.items())
        return dataclasses.replace(
            fused,
            kinds={kind: statistics.median(of_stages) for kind, of_stages in kinds.items()},
            tasks=tasks,
            outside={key: statistics.median(durations) for key, durations in outside.items()},
        )

    def link_of(self, edge: Edge) -> Link:
        """The link of an edge; within a group everything is free."""
        return Link() if edge[0] == edge[1] else self.links.get(edge, self.link)

    def times(self, types: Iterable[TaskType]) -> dict[TaskType, float]:
        """The time of each type of task. Raises ``ValueError`` that names the types without a time."""
        times = {each: self.tasks.get(each, self.kinds.get(each.kind)) for each in types}
        unknown = sorted(str(each) for each, time in times.items() if time is None)
        if unknown:
            where = "give it in Costs.kinds or Costs.tasks"
            raise ValueError(f"no time is known of {', '.join(unknown)}; {where}")
        return {key: time for key, time in times.items() if time is not None}

    def share(self, types: Sequence[TaskType], alone: Sequence[float]) -> list[float]:
        """The times of a cell's members, given the times that they take as single tasks."""
        whole, total = self.fused.get(tuple(types)), sum(alone)
        if whole is None:
            return list(alone)
        return [whole * time / total if total else whole / len(alone) for time in alone]


def types_of(cell: Cell) -> tuple[TaskType, ...]:
    return tuple(task.type for task in cell.tasks)
