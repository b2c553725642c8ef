"""Makes lists of tasks by simulating groups that choose their next task whenever they are free."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpmd.ir.plan import Cell, Task, TaskKind
from mpmd.ir.slices import SliceNumbers
from mpmd.schedules.base import Placement
from mpmd.schedules.orders import on_slice, on_slices
from mpmd.validation import is_sequence, number_fault, raise_faults, type_fault

_Type = tuple[TaskKind, int]
"""A ``TaskType`` as a plain tuple, because a simulation makes millions."""


@dataclasses.dataclass(frozen=True)
class TaskTimes:
    """The times of tasks, in any unit.

    Attributes:
      fwd, bwd, bwdA, bwdW: the time of a kind of task: a number for all stages, or a sequence with one for
        each. If microbatches are cut into slices, a sequence has the times of all stages on slice 0 first,
        then the times of all stages on slice 1, and so on.
      hop: the time of a message from one group to another.

    Raises ``ValueError`` when a time is negative, ``TypeError`` when it is no number.
    """

    fwd: float | Sequence[float] = 1
    bwd: float | Sequence[float] = 2
    bwdA: float | Sequence[float] = 1
    bwdW: float | Sequence[float] = 1
    hop: float = 0

    def __post_init__(self) -> None:
        times: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if is_sequence(value) and field.name != "hop":
                object.__setattr__(self, field.name, tuple(value))
                times |= {f"{field.name}[{stage}]": time for stage, time in enumerate(value)}
            else:
                times[field.name] = value
        raise_faults(*(number_fault(name, time, "a time", least=0) for name, time in times.items()))

    def of(self, task: Task) -> float:
        """The time that a task takes."""
        raise_faults(type_fault("task", task, Task, "a Task"))
        time = getattr(self, task.kind)
        return time[task.stage] if isinstance(time, tuple) else time


UNIT_TIMES = TaskTimes()


@dataclasses.dataclass
class GroupState:
    """A group in the simulation. The tasks of each type run in ascending order of microbatches.

    If microbatches are cut into slices, tasks have stages from 0 to ``num_stages - 1``, and positions of
    slices in the place of microbatches, as in ``on_slices``.

    Attributes:
      arrived: for each type, the number of tasks whose inputs have arrived.
      started: for each type, the number of tasks that have started.
      weights: the ``bwdW`` that can start, the oldest first.
      tasks: the list so far.
      in_flight: the number of forwards that have started and whose backward has not ended.
      busy: whether a task is running.
    """

    mpmd_idx: int
    stages: tuple[int, ...]
    arrived: dict[_Type, int] = dataclasses.field(default_factory=lambda: collections.defaultdict(int))
    started: dict[_Type, int] = dataclasses.field(default_factory=lambda: collections.defaultdict(int))
    weights: collections.deque[Task] = dataclasses.field(default_factory=collections.deque)
    tasks: list[Cell] = dataclasses.field(default_factory=list)
    in_flight: int = 0
    busy: bool = False

    def ready(self, kind: TaskKind) -> list[Task]:
        """The next tasks of a kind whose inputs have arrived, by ascending stage."""
        types: Iterable[_Type] = ((kind, stage) for stage in self.stages)
        return [
            Task(*task_type, self.started[task_type])
            for task_type in types
            if self.started[task_type] < self.arrived[task_type]
        ]

    def can_start(self, task: Task) -> bool:
        task_type = task.kind, task.stage
        return self.started[task_type] == task.microbatch < self.arrived[task_type]

    def start(self, task: Task) -> None:
        assert self.can_start(task), f"group {self.mpmd_idx} chose {task}, which cannot start"
        self.busy = True
        self.tasks.append(task)
        self.started[task.kind, task.stage] += 1
        self.in_flight += task.kind == "fwd"
        if task.kind == "bwdW":
            self.weights.remove(task)

    def end(self, task: Task) -> None:
        self.busy = False
        self.in_flight -= task.kind in ("bwd", "bwdW")
        if task.kind == "bwdA":
            self.arrive(("bwdW", task.stage))
            self.weights.append(Task("bwdW", task.stage, task.microbatch))

    def arrive(self, task_type: _Type) -> None:
        self.arrived[task_type] += 1


DispatchRule = Callable[[GroupState], Task | None]
"""The task that a free group starts now; ``None`` if it is to wait until more tasks can start."""


def dispatch(
    placement: Placement,
    num_microbatches: int,
    choose: DispatchRule,
    times: TaskTimes = UNIT_TIMES,
    backward: TaskKind | None = "bwdA",
    slices: int = 1,
) -> tuple[list[list[Cell]], float]:
    """Simulates groups that follow a rule, and lists the tasks that they run.

    Args:
      placement: the group of each stage.
      choose: the rule; it is asked when a group is free and something has changed for the group.
      times: how long tasks and messages take.
      backward: the kind of backwards: ``"bwd"``, ``"bwdA"`` (with a ``bwdW`` after each), or ``None``.
      slices: the number of slices of each microbatch. Values from one slice to the next stay on their group,
        and follow from the order of the group's tasks. The last stage's backwards of a microbatch can start
        when its forward on the last slice has ended.

    Returns: the lists, and the time of the step.
    """
    numbers = SliceNumbers(len(placement), slices)
    groups = [
        GroupState(mpmd_idx, tuple(stage for stage, home in enumerate(placement) if home == mpmd_idx))
        for mpmd_idx in range(max(placement) + 1)
    ]
    for _ in range(num_microbatches * slices):
        groups[placement[0]].arrive(("fwd", 0))
    # Time, number in order of insertion, group, and the task that ends or the type of which inputs arrive.
    events: list[tuple[float, int, int, Task | _Type]] = []
    order = itertools.count()
    now: float = 0
    awake = set(range(len(groups)))
    while True:
        for mpmd_idx in sorted(awake):
            group = groups[mpmd_idx]
            if not group.busy and (task := choose(group)):
                group.start(task)
                end = now + times.of(on_slice(task, numbers))
                heapq.heappush(events, (end, next(order), mpmd_idx, task))
        if not events:
            return on_slices([group.tasks for group in groups], numbers), now
        now = events[0][0]
        awake = set()
        while events and events[0][0] <= now:
            _, _, mpmd_idx, event = heapq.heappop(events)
            awake.add(mpmd_idx)
            if not isinstance(event, Task):
                groups[mpmd_idx].arrive(event)
                continue
            groups[mpmd_idx].end(event)
            for task_type in _next_types(event, numbers, backward):
                hop = times.hop if placement[task_type[1]] != mpmd_idx else 0
                heapq.heappush(events, (now + hop, next(order), placement[task_type[1]], task_type))


def _next_types(task: Task, numbers: SliceNumbers, backward: TaskKind | None) -> list[_Type]:
    """The types of the tasks that wait for ``task``: for a last forward, all backwards of its microbatch."""
    if task.kind == "fwd" and task.stage + 1 < numbers.num_stages:
        return [("fwd", task.stage + 1)]
    if task.kind == "fwd":
        is_last = (task.microbatch + 1) % numbers.slices == 0
        return [(backward, task.stage)] * numbers.slices if backward and is_last else []
    return [(task.kind, task.stage - 1)] if task.kind != "bwdW" and task.stage > 0 else []


def in_order(lists: Iterable[Iterable[Task]], limit: float = math.inf, fill: bool = False) -> DispatchRule:
    """The rule that each group runs its list, never with more than ``limit`` forwards in flight.

    With ``fill`` the lists have no ``bwdW``: a group runs its oldest ``bwdW`` when it would have to wait.
    """
    queues = [collections.deque(tasks) for tasks in lists]

    def choose(group: GroupState) -> Task | None:
        queue = queues[group.mpmd_idx]
        if queue and group.can_start(queue[0]) and (queue[0].kind != "fwd" or group.in_flight < limit):
            return queue.popleft()
        return group.weights[0] if fill and group.weights else None

    return choose
