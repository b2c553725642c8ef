"""Simulates a schedule with given times of tasks and messages; its task lists are prepared once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

from mpmd.ir.plan import Edge
from mpmd.ir.slices import SliceNumbers
from mpmd.ir.tasks import Task, TaskType
from mpmd.schedules import TaskLists
from mpmd.simulate import Costs, Link
from mpmd.simulate.schedule import schedule_workload
from mpmd.simulate.sharing import run_sharing
from mpmd.simulate.workload import Workload, run


@dataclasses.dataclass(frozen=True)
class LoopTimes:
    """Seconds after which each group ends a loop, and seconds for which it computes."""

    ends: list[float]
    busy: list[float]


class TimedOrder:
    """The task lists of a schedule, ready to be simulated. Fused cells are atomic, as executables are.

    The tasks of a stage take equally long on all slices of a microbatch.
    """

    def __init__(self, tasks: TaskLists, homes: tuple[int, ...], slices: int):
        self._workload = schedule_workload(tasks, Costs(atomic=True), slices)
        cells = [cell.tasks for row in tasks for cell in row]
        stages = SliceNumbers(len(homes), slices)
        self._cells = _TasksOfCells.of(cells, stages)
        self._messages = _TasksOfCells.of(_sent_values(self._workload, cells, homes), stages)

    def run(
        self,
        times: Mapping[TaskType, float],
        messages: Mapping[TaskType, float],
        links: Mapping[Edge, Link],
        at_once: float = math.inf,
    ) -> LoopTimes:
        """Simulates the loop.

        Args:
          times: the seconds of each type of task.
          messages: the bytes of a message, by the type of task that sends it.
          links: of the edges.
          at_once: how many groups can be at work at once, as ``Costs`` has it.
        """
        costs = Costs(links=links, at_once=at_once)
        runs = run if math.isinf(at_once) else run_sharing
        workload = self._with(times, messages, costs)
        [step] = runs(workload, steps=1)
        busy = [sum(step.durations[start:stop]) for start, stop in itertools.pairwise(workload.bounds)]
        return LoopTimes(step.group_ends, busy)

    def _with(self, times, messages, costs: Costs) -> Workload:
        return dataclasses.replace(
            self._workload,
            costs=costs,
            durations=self._cells.sums(times),
            messages=dataclasses.replace(self._workload.messages, nbytes=self._messages.sums(messages)),
        )


@dataclasses.dataclass(frozen=True)
class _TasksOfCells:
    """The tasks of cells, or the tasks whose values are in messages.

    Attributes:
      types: the types of tasks of each kind of part.
      kinds: the kind of each part, an index into ``types``.
    """

    types: list[tuple[TaskType, ...]]
    kinds: list[int]

    @classmethod
    def of(cls, parts: list[tuple[Task, ...]], stages: SliceNumbers) -> _TasksOfCells:
        of_parts = [
            tuple(TaskType(task.kind, stages.stage_of(task.stage)) for task in part) for part in parts
        ]
        numbers = {types: number for number, types in enumerate(dict.fromkeys(of_parts))}
        return cls([*numbers], [numbers[types] for types in of_parts])

    def sums(self, amounts: Mapping[TaskType, float]) -> list[float]:
        of_kind = [float(sum(amounts.get(task_type, 0.0) for task_type in types)) for types in self.types]
        return [of_kind[kind] for kind in self.kinds]


def _sent_values(
    workload: Workload, cells: list[tuple[Task, ...]], homes: tuple[int, ...]
) -> list[tuple[Task, ...]]:
    """For each message, the tasks whose values the message carries: tasks of the sender with a reader on the
    receiving group."""
    tasks_of_messages = []
    for message, sender in enumerate(workload.messages.senders):
        _, receiver = workload.edge(message)
        values = [task for task in cells[sender] if _reader(task, homes) == receiver]
        assert values, f"message {message} of {cells[sender]} to group {receiver} has no value"
        tasks_of_messages.append(tuple(values))
    return tasks_of_messages


def _reader(task: Task, homes: tuple[int, ...]) -> int | None:
    on_slice = SliceNumbers(len(homes)).stage_of(task.stage)
    stage = {"fwd": on_slice + 1, "bwd": on_slice - 1, "bwdA": on_slice - 1, "bwdW": -1}[task.kind]
    return homes[stage] if 0 <= stage < len(homes) else None
