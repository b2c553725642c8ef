"""What a picture shows, as data: boxes in lanes, one lane per group, and the memory each group holds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

from mpmd.ir import Task, TaskKind
from mpmd.report import human_bytes
from mpmd.simulate import Costs, Simulation
from mpmd.simulate.costs import cell_of
from mpmd.timeline import Event


@dataclasses.dataclass(frozen=True)
class Box:
    """A task, or other text if ``task`` is ``None``, in the lane of a group; time from the first event."""

    lane: int
    task: Task | None
    label: str
    start: float
    end: float

    @property
    def kind(self) -> TaskKind | None:
        return self.task.kind if self.task else None

    @property
    def waits(self) -> bool:
        return self.task is None and self.label.startswith("wait")

    @property
    def text(self) -> str:
        return self.label if self.task is None else str(self.task.microbatch)


@dataclasses.dataclass(frozen=True)
class Chart:
    """A step to draw."""

    groups: tuple[int, ...]
    """The groups, by lane."""
    boxes: tuple[Box, ...]
    makespan: float
    memory: tuple[tuple[tuple[float, float], ...], ...]
    """For each lane the times at which its memory changes, and to how much; empty if nobody knows."""
    physical: bool
    """Whether times are in seconds, and memory in bytes.

    Otherwise times have no unit, and memory is in microbatches of as many stages as a group has on average,
    so that schedules of the same model can be compared that cut it into more or fewer stages.
    """

    @staticmethod
    def of(source: Simulation | Iterable[Event], of_plan: bool = False) -> Chart:
        """The chart of a simulation, of a plan or a schedule, or of measured events.

        Raises ``ValueError`` when there is nothing to draw.
        """
        if isinstance(source, Simulation):
            return _simulated(source, of_plan)
        events = list(source)
        if not events:
            raise ValueError("there are no events to draw; was the step measured?")
        origin = min(event.start for event in events)
        groups = tuple(sorted({event.mpmd_idx for event in events}))
        boxes = _boxes(events, groups, origin)
        return Chart(groups, boxes, max(box.end for box in boxes) or 1.0, memory=(), physical=True)

    @property
    def tasks(self) -> list[Task]:
        return [box.task for box in self.boxes if box.task]

    @property
    def fused(self) -> list[tuple[int, float, float]]:
        """The lane, start and end of the cells of several tasks, if the chart has these as a whole."""
        cells = [list(boxes) for _, boxes in itertools.groupby(self.boxes, lambda box: (box.lane, box.label))]
        return [(first.lane, first.start, rest[-1].end) for first, *rest in cells if rest]

    @functools.cached_property
    def busy(self) -> list[float]:
        """For each lane the share of the makespan in which it works."""
        busy = [0.0] * len(self.groups)
        for box in self.boxes:
            if not box.waits:
                busy[box.lane] += (box.end - box.start) / self.makespan
        return busy

    @property
    def bubble(self) -> float:
        """The share of all groups' time that is idle."""
        return 1 - sum(self.busy) / len(self.groups)

    def amount(self, amount: float) -> str:
        """An amount of memory as text."""
        return human_bytes(amount) if self.physical else f"{amount:.4g}"

    @functools.cached_property
    def peaks(self) -> list[float]:
        """For each lane the most it holds at once."""
        return [max((amount for _, amount in steps), default=0.0) for steps in self.memory]

    @property
    def holds(self) -> bool:
        """Whether there is memory to show."""
        return any(self.peaks)

    @functools.cached_property
    def stages(self) -> list[list[int]]:
        """For each lane its stages, ascending."""
        stages: list[set[int]] = [set() for _ in self.groups]
        for box in self.boxes:
            if box.task:
                stages[box.lane].add(box.task.stage)
        return [sorted(found) for found in stages]

    @property
    def size(self) -> str:
        """How many groups, stages and microbatches there are, as text."""
        stages = len({task.stage for task in self.tasks})
        microbatches = len({task.microbatch for task in self.tasks})
        counts = [
            (len(self.groups), "group", "s"),
            (stages, "stage", "s"),
            (microbatches, "microbatch", "es"),
        ]
        return ", ".join(f"{count} {noun}{'' if count == 1 else ending}" for count, noun, ending in counts)

    @property
    def figures(self) -> str:
        """Makespan, bubble, and the most that a group holds, as text."""
        figures = [f"makespan {self.time(self.makespan)}", f"bubble {self.bubble:.1%}"]
        if self.memory:
            figures.append(f"peak memory {self.amount(max(self.peaks))}")
        return ", ".join(figures)

    def time(self, time: float) -> str:
        """A time as text, with its unit."""
        scale, unit = self.unit
        return f"{time * scale:.4g} {unit}" if unit else f"{time:.5g}"

    @property
    def unit(self) -> tuple[float, str]:
        """What to multiply times with to show them, and what the unit is called then."""
        if not self.physical:
            return 1.0, ""
        return (1.0, "s") if self.makespan >= 2 else (1e3, "ms") if self.makespan >= 2e-3 else (1e6, "µs")


def _simulated(simulation: Simulation, of_plan: bool) -> Chart:
    if not simulation.events:
        raise ValueError("there is nothing to draw; no group has tasks")
    groups = tuple(range(simulation.mpmd_dim))
    boxes = _boxes(simulation.events, groups, 0.0)
    stages = {box.task.stage for box in boxes if box.task}
    unit = 1.0 if of_plan else (max(stages, default=0) + 1) / len(groups)
    memory = tuple(tuple((time, amount / unit) for time, amount in steps) for steps in simulation.memory)
    return Chart(groups, boxes, simulation.makespan or 1.0, memory, physical=of_plan)


def _boxes(events: Sequence[Event], groups: Sequence[int], origin: float) -> tuple[Box, ...]:
    """A box per task; of a fused task, the time is divided in proportion to what its kinds of task take."""
    kinds = Costs.measured(events).kinds
    boxes = []
    for event in events:
        lane, start = groups.index(event.mpmd_idx), event.start - origin
        tasks = tasks_of(event) or (None,)
        times = [kinds[task.kind] if task else 1.0 for task in tasks]
        for task, time in zip(tasks, times, strict=True):
            end = start + event.duration * (time / sum(times) if sum(times) else 1 / len(times))
            boxes.append(Box(lane, task, event.label, start, end))
            start = end
    return tuple(boxes)


def tasks_of(event: Event) -> tuple[Task, ...]:
    """The tasks of an event whose label is a schedule's cell; none of others."""
    cell = cell_of(event.label)
    return cell.tasks if cell else ()
