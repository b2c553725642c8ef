"""The data of a picture: boxes in lanes, one lane per group, and the memory that each group holds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

from mpmd.ir.events import Event, Wait, checked_events
from mpmd.ir.plan import AnyTask, Cell, Task, TaskKind
from mpmd.ir.slices import SliceNumbers
from mpmd.schedules.text import slice_numbers
from mpmd.simulate import Costs, Simulation
from mpmd.util.tables import human_bytes


@dataclasses.dataclass(frozen=True)
class Box:
    """An activity of a group, in the group's lane.

    Attributes:
      task: the task of a stage; ``None`` for a wait and for work outside the loop.
      activity: the activity of the event; a fused task has a box for each of its tasks.
      start, end: times from the first event.
    """

    lane: int
    task: Task | None
    activity: AnyTask | Wait
    start: float
    end: float

    @property
    def kind(self) -> TaskKind | None:
        return self.task.kind if self.task else None

    @property
    def waits(self) -> bool:
        return isinstance(self.activity, Wait)

    @property
    def text(self) -> str:
        return str(self.activity if self.task is None else self.task.microbatch)


@dataclasses.dataclass(frozen=True)
class Chart:
    """A step to draw.

    Attributes:
      groups: the group of each lane.
      boxes: the activities of the groups, by lane and start.
      makespan: the time from the first event to the end of the last one.
      memory: for each lane, the times at which its memory changes, and its memory from then on; empty if the
        memory is unknown.
      slices: the number of slices of each microbatch.
      physical: whether times are in seconds, and memory in bytes. Otherwise times have no unit, and memory is
        in microbatches of as many stages as a group has on average, so that schedules that cut the same model
        into more or fewer stages can be compared.
    """

    groups: tuple[int, ...]
    boxes: tuple[Box, ...]
    makespan: float
    memory: tuple[tuple[tuple[float, float], ...], ...]
    physical: bool
    slices: int = 1

    @staticmethod
    def of(source: Simulation | Iterable[Event], of_plan: bool = False, slices: int = 1) -> Chart:
        """The chart of a simulation or of measured events.

        Args:
          of_plan: whether the simulation is of a plan, in seconds and bytes.
          slices: the number of slices of each microbatch.

        Raises ``ValueError`` when there is nothing to draw.
        """
        simulation = source if isinstance(source, Simulation) else None
        events = simulation.events if simulation else checked_events("source", source)
        if not events and simulation:
            raise ValueError("there is nothing to draw; no group has tasks")
        if not events:
            raise ValueError("there are no events to draw; was the step measured?")
        origin = 0.0 if simulation else min(event.start for event in events)
        groups = range(simulation.mpmd_dim) if simulation else sorted({event.mpmd_idx for event in events})
        boxes = _boxes(events, groups, origin)
        last_stage = max((box.task.stage for box in boxes if box.task), default=0)
        unit = 1.0 if of_plan else (last_stage + 1) / len(groups)
        return Chart(
            groups=tuple(groups),
            boxes=boxes,
            makespan=(simulation.makespan if simulation else max(box.end for box in boxes)) or 1.0,
            memory=tuple(
                tuple((time, amount / unit) for time, amount in steps)
                for steps in (simulation.memory if simulation else ())
            ),
            physical=of_plan or not simulation,
            slices=slices,
        )

    @property
    def tasks(self) -> list[Task]:
        return [box.task for box in self.boxes if box.task]

    @property
    def fused(self) -> list[tuple[int, float, float]]:
        cells = [
            list(boxes) for _, boxes in itertools.groupby(self.boxes, lambda box: (box.lane, box.activity))
        ]
        return [(first.lane, first.start, rest[-1].end) for first, *rest in cells if rest]

    @functools.cached_property
    def busy(self) -> list[float]:
        busy = [0.0] * len(self.groups)
        for box in self.boxes:
            if not box.waits:
                busy[box.lane] += (box.end - box.start) / self.makespan
        return busy

    @property
    def bubble(self) -> float:
        return 1 - sum(self.busy) / len(self.groups)

    def memory_text(self, amount: float) -> str:
        return human_bytes(amount) if self.physical else f"{amount:.4g}"

    @functools.cached_property
    def peaks(self) -> list[float]:
        return [max((amount for _, amount in steps), default=0.0) for steps in self.memory]

    @functools.cached_property
    def stages(self) -> list[list[int]]:
        """For each lane, the numbers of the group's stages on all slices, ascending."""
        stages: list[set[int]] = [set() for _ in self.groups]
        for box in self.boxes:
            if box.task:
                stages[box.lane].add(box.task.stage)
        return [sorted(of_lane) for of_lane in stages]

    @property
    def numbers(self) -> SliceNumbers:
        return slice_numbers([self.tasks], self.slices)

    @property
    def size(self) -> str:
        """The numbers of groups, stages and microbatches, as text. Loops may differ in their microbatches."""
        microbatches: dict[int, set[int]] = {}
        for task in self.tasks:
            microbatches.setdefault(task.stage, set()).add(task.microbatch)
        counts = [
            ([len(self.groups)], "group", "s"),
            ([len(microbatches) // self.slices], "stage", "s"),
            *([([self.slices], "slice", "s")] if self.slices > 1 else []),
            (
                list(dict.fromkeys(len(microbatches[stage]) for stage in sorted(microbatches))),
                "microbatch",
                "es",
            ),
        ]
        return ", ".join(
            f"{' and '.join(map(str, numbers)) or 0} {noun}{'' if numbers == [1] else ending}"
            for numbers, noun, ending in counts
        )

    @property
    def figures(self) -> str:
        figures = [f"makespan {self.time_text(self.makespan)}", f"bubble {self.bubble:.1%}"]
        if self.memory:
            figures.append(f"peak memory {self.memory_text(max(self.peaks))}")
        return ", ".join(figures)

    def time_text(self, time: float) -> str:
        scale, unit = self.unit
        return f"{time * scale:.4g} {unit}" if unit else f"{time:.5g}"

    @property
    def unit(self) -> tuple[float, str]:
        if not self.physical:
            return 1.0, ""
        return (1.0, "s") if self.makespan >= 2 else (1e3, "ms") if self.makespan >= 2e-3 else (1e6, "µs")


def _boxes(events: Sequence[Event], groups: Sequence[int], origin: float) -> tuple[Box, ...]:
    """Returns a box per task; members of a fused task share its time in proportion to their kinds' times."""
    kinds = Costs.measured(events).kinds
    boxes = []
    for event in events:
        lane, start = groups.index(event.mpmd_idx), event.start - origin
        tasks = tasks_of(event) or (None,)
        times = [kinds[task.kind] if task else 1.0 for task in tasks]
        for task, time in zip(tasks, times, strict=True):
            end = start + event.duration * (time / sum(times) if sum(times) else 1 / len(times))
            boxes.append(Box(lane=lane, task=task, activity=event.activity, start=start, end=end))
            start = end
    return tuple(boxes)


def tasks_of(event: Event) -> tuple[Task, ...]:
    return event.activity.tasks if isinstance(event.activity, Cell) else ()
