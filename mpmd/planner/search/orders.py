"""The task lists of schedules, read once for all candidates that have the schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from mpmd.ir.slices import SliceNumbers
from mpmd.ir.tasks import Cell, TaskKind
from mpmd.planner.candidate import Candidate
from mpmd.planner.search.timed_order import TimedOrder
from mpmd.schedules import CustomSchedule, Schedule, TaskLists

_CHANGES = {"fwd": 1, "bwd": -1, "bwdA": 0, "bwdW": -1}


@dataclasses.dataclass(frozen=True)
class Order:
    """The task lists of a schedule.

    Attributes:
      tasks: the list of each group.
      homes: the group of each stage.
      stages: the stages of each group.
      kinds: of the tasks.
      in_flight: for each group, the numbers of microbatches of its stages between forward and backward, or of
        slices of microbatches, at all moments whose numbers no other moment reaches for every stage.
      slices: of each microbatch.
    """

    tasks: TaskLists
    homes: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    kinds: frozenset[TaskKind]
    in_flight: tuple[tuple[tuple[int, ...], ...], ...]
    slices: int

    @functools.cached_property
    def timed(self) -> TimedOrder:
        return TimedOrder(self.tasks, self.homes, self.slices)


@functools.lru_cache(maxsize=128)
def order_of(schedule: Schedule, num_microbatches: int) -> Order:
    """The order of a schedule. Raises ``ValueError`` where the schedule does."""
    tasks, numbers = schedule.tasks(num_microbatches), schedule.numbers
    stages = tuple(
        tuple(sorted({numbers.stage_of(t.stage) for cell in cells for t in cell.tasks})) for cells in tasks
    )
    home_of = {stage: mpmd_idx for mpmd_idx, of_group in enumerate(stages) for stage in of_group}
    return Order(
        tasks=tasks,
        homes=tuple(home_of[stage] for stage in range(schedule.num_stages)),
        stages=stages,
        kinds=frozenset(task.kind for cell in tasks[0] for task in cell.tasks),
        in_flight=tuple(
            _most_in_flight(cells, of_group, numbers) for cells, of_group in zip(tasks, stages, strict=True)
        ),
        slices=schedule.slices,
    )


def _most_in_flight(
    cells: Sequence[Cell], stages: tuple[int, ...], numbers: SliceNumbers
) -> tuple[tuple[int, ...], ...]:
    position = {stage: index for index, stage in enumerate(stages)}
    counts, moments, grew = [0] * len(stages), set(), False
    for cell in cells:
        for task in cell.tasks:
            change = _CHANGES[task.kind]
            if grew and change < 0:
                moments.add(tuple(counts))
                grew = False
            counts[position[numbers.stage_of(task.stage)]] += change
            grew = grew or change > 0
    moments.add(tuple(counts))
    return _maximal(moments)


def _maximal(vectors: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The vectors that no other vector matches or exceeds in every entry."""
    kept: list[tuple[int, ...]] = []
    for vector in sorted(vectors, key=sum, reverse=True):
        if not any(all(map(int.__le__, vector, other)) for other in kept):
            kept.append(vector)
    return tuple(kept)


MOST_TASKS = 10_000
"""Steps with more tasks are simulated for two smaller numbers of microbatches, and extrapolated."""


def simulated_numbers(schedule: Schedule, num_microbatches: int) -> tuple[int, ...]:
    """The numbers of microbatches for which a step is simulated: its own, or two smaller ones.

    After a warm-up schedules repeat themselves, with as many microbatches as there are groups at most; so the
    step and its memory grow linearly with the number of microbatches. Whether the rounds of an interleaved
    schedule are all of one length is kept.
    """
    groups = schedule.mpmd_dim
    first = 2 * groups + min(1, num_microbatches % groups)
    num_tasks = 2 * schedule.num_stages * schedule.slices * num_microbatches
    is_short = num_tasks <= MOST_TASKS or first + groups >= num_microbatches
    if is_short or isinstance(schedule, CustomSchedule):
        return (num_microbatches,)
    return first, first + groups


def num_simulated_tasks(candidate: Candidate) -> int:
    schedule = candidate.schedule
    numbers = simulated_numbers(schedule, candidate.num_microbatches)
    return sum(len(cells) for number in numbers for cells in order_of(schedule, number).tasks)


def prolong(
    values: Sequence[Sequence[float]], simulated: tuple[int, ...], number: int, least: float = 0.0
) -> list[float]:
    """Extrapolates values that grow linearly with the number of microbatches.

    Args:
      values: for each simulated number of microbatches.
      number: of microbatches, for which values are returned.
      least: by which each value grows at least with every microbatch. In the simulation a pipeline of uneven
        stages may still be filling, but its slowest group works for every microbatch.
    """
    if len(simulated) == 1:
        return [*values[0]]
    span = simulated[1] - simulated[0]
    return [
        last + (number - simulated[1]) * max(least, (last - first) / span)
        for first, last in zip(*values, strict=True)
    ]


def stages_in_flight(schedule: Schedule, num_microbatches: int) -> tuple[tuple[int, ...], list[float]]:
    """The group of each stage, and the stage's microbatches (or slices) in flight at the time when its group
    has the most in flight."""
    simulated = simulated_numbers(schedule, num_microbatches)
    orders = [order_of(schedule, number) for number in simulated]
    counts = []
    for order in orders:
        of_stage = [0.0] * schedule.num_stages
        for stages, vectors in zip(order.stages, order.in_flight, strict=True):
            for stage, count in zip(stages, max(vectors, key=sum), strict=True):
                of_stage[stage] = count
        counts.append(of_stage)
    return orders[-1].homes, prolong(counts, simulated, num_microbatches)
