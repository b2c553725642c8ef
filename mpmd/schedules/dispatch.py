"""Makes lists by simulating groups that choose their next task whenever they are free."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from mpmd.ir import Cell, Task, TaskKind
from mpmd.schedules.base import Placement

Lane = tuple[TaskKind, int]
"""A kind of task and a stage; the microbatches of a lane run in ascending order."""


@dataclasses.dataclass(frozen=True)
class TaskTimes:
    """How long tasks take, in any unit: a number for all stages, or a sequence with one for each.

    ``bwd`` is a whole backward, ``bwdA`` and ``bwdW`` are the parts of a split one; ``hop`` is how long a
    message from one group to another is on its way.

    Raises ``ValueError`` when a time is negative.
    """

    fwd: float | Sequence[float] = 1
    bwd: float | Sequence[float] = 2
    bwdA: float | Sequence[float] = 1
    bwdW: float | Sequence[float] = 1
    hop: float = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sequence):
                object.__setattr__(self, field.name, tuple(value))
            if min(value if isinstance(value, Sequence) else [value], default=0) < 0:
                raise ValueError(f"a time cannot be negative, got {field.name}={value}")

    def of(self, task: Task) -> float:
        """The time that a task takes."""
        time = getattr(self, task.kind)
        return time[task.stage] if isinstance(time, tuple) else time


UNITS = TaskTimes()


@dataclasses.dataclass
class Group:
    """A group while its list is being made.

    ``arrived`` and ``started`` count by lane the microbatches whose task could start and did; ``weights`` are
    the ``bwdW`` that wait, oldest first. ``in_flight`` counts the stages' microbatches between the start of
    their forward and the end of their backward.
    """

    mpmd_idx: int
    stages: tuple[int, ...]
    arrived: dict[Lane, int] = dataclasses.field(default_factory=lambda: collections.defaultdict(int))
    started: dict[Lane, int] = dataclasses.field(default_factory=lambda: collections.defaultdict(int))
    weights: collections.deque[Task] = dataclasses.field(default_factory=collections.deque)
    tasks: list[Cell] = dataclasses.field(default_factory=list)
    in_flight: int = 0
    busy: bool = False

    def ready(self, kind: TaskKind) -> list[Task]:
        """The next tasks of a kind of which all inputs are there, by ascending stage."""
        lanes = ((kind, stage) for stage in self.stages)
        return [Task(*lane, self.started[lane]) for lane in lanes if self.started[lane] < self.arrived[lane]]

    def can_start(self, task: Task) -> bool:
        """Whether the task is the next of its lane, and all its inputs are there."""
        lane = task.kind, task.stage
        return self.started[lane] == task.microbatch < self.arrived[lane]

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

    def arrive(self, lane: Lane) -> None:
        self.arrived[lane] += 1


Choose = Callable[[Group], Task | None]
"""What a free group starts now, of what is ready; ``None`` to wait until more is."""


def dispatch(
    placement: Placement,
    num_microbatches: int,
    choose: Choose,
    times: TaskTimes = UNITS,
    backward: TaskKind | None = "bwdA",
) -> tuple[list[list[Cell]], float]:
    """The lists of tasks that groups make when each runs what ``choose`` says, and the time they take.

    Args:
      placement: the group of each stage.
      num_microbatches: microbatches of the step.
      choose: asked when a group is free and something has changed for it.
      times: how long tasks and messages take.
      backward: what follows the last forward: ``"bwd"``, ``"bwdA"`` (and a ``bwdW`` after each), or nothing.
    """
    groups = [
        Group(mpmd_idx, tuple(stage for stage, home in enumerate(placement) if home == mpmd_idx))
        for mpmd_idx in range(max(placement) + 1)
    ]
    for _ in range(num_microbatches):
        groups[placement[0]].arrive(("fwd", 0))
    # What happens to a group at a time, in the order in which it was known: a task ends, or a lane gets more.
    events: list[tuple[float, int, int, Task | Lane]] = []
    order = itertools.count()
    now: float = 0
    awake = set(range(len(groups)))
    while True:
        for mpmd_idx in sorted(awake):
            group = groups[mpmd_idx]
            if not group.busy and (task := choose(group)):
                group.start(task)
                heapq.heappush(events, (now + times.of(task), next(order), mpmd_idx, task))
        if not events:
            return [group.tasks for group in groups], now
        now = events[0][0]
        awake = set()
        while events and events[0][0] <= now:
            _, _, mpmd_idx, event = heapq.heappop(events)
            awake.add(mpmd_idx)
            if not isinstance(event, Task):
                groups[mpmd_idx].arrive(event)
                continue
            groups[mpmd_idx].end(event)
            if lane := _next_lane(event, len(placement), backward):
                hop = times.hop if placement[lane[1]] != mpmd_idx else 0
                heapq.heappush(events, (now + hop, next(order), placement[lane[1]], lane))


def _next_lane(task: Task, num_stages: int, backward: TaskKind | None) -> Lane | None:
    """Which lane goes on with the task's microbatch."""
    if task.kind == "fwd" and task.stage + 1 < num_stages:
        return "fwd", task.stage + 1
    if task.kind == "fwd":
        return (backward, task.stage) if backward else None
    return (task.kind, task.stage - 1) if task.kind != "bwdW" and task.stage > 0 else None


def in_order(lists: Iterable[Iterable[Task]], limit: float = math.inf, fill: bool = False) -> Choose:
    """Each group runs its list, waiting where it must; never with more in flight than ``limit``.

    With ``fill`` the lists have no ``bwdW``: a group runs the oldest of those it has when it would else wait.
    """
    queues = [collections.deque(tasks) for tasks in lists]

    def choose(group: Group) -> Task | None:
        queue = queues[group.mpmd_idx]
        if queue and group.can_start(queue[0]) and (queue[0].kind != "fwd" or group.in_flight < limit):
            return queue.popleft()
        return group.weights[0] if fill and group.weights else None

    return choose
