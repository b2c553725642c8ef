"""What a schedule's lists say, found once for all candidates that have the schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from mpmd.ir.tasks import Cell, TaskKind
from mpmd.planner.search.timed_order import TimedOrder
from mpmd.schedules import Schedule, TaskLists

_CHANGES = {"fwd": 1, "bwd": -1, "bwdA": 0, "bwdW": -1}


@dataclasses.dataclass(frozen=True)
class Order:
    """The lists of a schedule.

    Attributes:
      tasks: for each group what it runs.
      homes: the group of each stage.
      stages: the stages of each group.
      kinds: of the tasks.
      in_flight: for each group, the microbatches of each of its stages between forward and backward, at every
        moment at which no other has as many of each stage.
    """

    tasks: TaskLists
    homes: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    kinds: frozenset[TaskKind]
    in_flight: tuple[tuple[tuple[int, ...], ...], ...]

    @functools.cached_property
    def timed(self) -> TimedOrder:
        """The lists, to be run."""
        return TimedOrder(self.tasks, self.homes)

    @functools.cached_property
    def num_tasks(self) -> int:
        return sum(map(len, self.tasks))


@functools.lru_cache(maxsize=128)
def order_of(schedule: Schedule, num_microbatches: int) -> Order:
    """The order of a schedule. Raises ``ValueError`` where the schedule does."""
    tasks = schedule.tasks(num_microbatches)
    stages = tuple(tuple(sorted({t.stage for cell in cells for t in cell.tasks})) for cells in tasks)
    home_of = {stage: mpmd_idx for mpmd_idx, own in enumerate(stages) for stage in own}
    return Order(
        tasks=tasks,
        homes=tuple(home_of[stage] for stage in range(schedule.num_stages)),
        stages=stages,
        kinds=frozenset(task.kind for cell in tasks[0] for task in cell.tasks),
        in_flight=tuple(_most_in_flight(cells, own) for cells, own in zip(tasks, stages, strict=True)),
    )


def _most_in_flight(cells: Sequence[Cell], stages: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    position = {stage: index for index, stage in enumerate(stages)}
    counts, found, grew = [0] * len(stages), set(), False
    for cell in cells:
        for task in cell.tasks:
            change = _CHANGES[task.kind]
            if grew and change < 0:
                found.add(tuple(counts))
                grew = False
            counts[position[task.stage]] += change
            grew = grew or change > 0
    found.add(tuple(counts))
    return _maximal(found)


def _maximal(vectors: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    kept: list[tuple[int, ...]] = []
    for vector in sorted(vectors, key=sum, reverse=True):
        if not any(all(map(int.__le__, vector, other)) for other in kept):
            kept.append(vector)
    return tuple(kept)


MOST_TASKS = 10_000
"""Steps of more tasks are simulated for two smaller numbers of microbatches, and prolonged."""


def simulated_numbers(schedule: Schedule, num_microbatches: int) -> tuple[int, ...]:
    """The numbers of microbatches for which a step is simulated: its own, or two smaller ones.

    After a warm-up schedules repeat themselves, with as many microbatches as there are groups at most; so the
    step and its memory grow linearly with the number of microbatches. Whether the rounds of an interleaved
    schedule are all of one length is kept.
    """
    groups = schedule.mpmd_dim
    first = 2 * groups + min(1, num_microbatches % groups)
    if 2 * schedule.num_stages * num_microbatches <= MOST_TASKS or first + groups >= num_microbatches:
        return (num_microbatches,)
    return first, first + groups


def prolong(
    found: Sequence[Sequence[float]], simulated: tuple[int, ...], number: int, least: float = 0.0
) -> list[float]:
    """Numbers that grow linearly with the number of microbatches, found for those simulated, for another.

    Args:
      least: by which each grows at least with every microbatch. A pipeline of uneven stages may still be
        filling in what was simulated, but its slowest group works for every microbatch.
    """
    if len(simulated) == 1:
        return [*found[0]]
    span = simulated[1] - simulated[0]
    return [
        last + (number - simulated[1]) * max(least, (last - first) / span)
        for first, last in zip(*found, strict=True)
    ]


def stages_in_flight(schedule: Schedule, num_microbatches: int) -> tuple[tuple[int, ...], list[float]]:
    """The group of each stage, and the microbatches of each in flight when its group has most of all."""
    simulated = simulated_numbers(schedule, num_microbatches)
    orders = [order_of(schedule, number) for number in simulated]
    counts = []
    for order in orders:
        of_stage = [0.0] * schedule.num_stages
        for own, vectors in zip(order.stages, order.in_flight, strict=True):
            for stage, count in zip(own, max(vectors, key=sum), strict=True):
                of_stage[stage] = count
        counts.append(of_stage)
    return orders[-1].homes, prolong(counts, simulated, num_microbatches)
