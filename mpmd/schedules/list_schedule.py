"""List scheduling: the shortest order that is found for given times and a limit of memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Sequence

from mpmd.ir.plan import Cell, Task, TaskKind
from mpmd.schedules.base import AnyPlacement, Schedule, check_num_microbatches, round_robin, v_shape
from mpmd.schedules.dispatch import UNIT_TIMES, DispatchRule, GroupState, TaskTimes, dispatch, in_order
from mpmd.schedules.gpipe import GPipe, InterleavedGPipe
from mpmd.schedules.interleaved import Interleaved1F1B
from mpmd.schedules.one_f_one_b import Std1F1B
from mpmd.schedules.orders import by_position
from mpmd.schedules.seq_1f1b import Seq1F1B
from mpmd.schedules.v_shaped import VHalf, VMin, ZeroBubbleV
from mpmd.schedules.zero_bubble import InterleavedZeroBubble, ZeroBubbleH2
from mpmd.validation import bool_fault, int_fault, int_faults, is_sequence, raise_faults, type_fault


@dataclasses.dataclass(frozen=True)
class ListSchedule(AnyPlacement):
    """The shortest order found for stages whose times differ, within a limit of memory.

    It simulates groups that, whenever they are free, start the best task that can start, by two rules for the
    best task. It also simulates the handmade schedules that have the same placement and keep to the limit. It
    takes the shortest order; of equally short orders, it takes the order with the least memory. So it
    is never longer than

    - ``Std1F1B``, ``Interleaved1F1B`` and ``InterleavedGPipe``, for whole backwards,
    - ``ZeroBubble``, ``ZeroBubbleH2``, ``InterleavedZeroBubble``, ``ZeroBubbleV``, ``VHalf`` and ``VMin``,
      for split ones,
    - ``Seq1F1B``, and ``GPipe`` for whole backwards, if microbatches are cut into slices,

    where those fit. It suits a stage that is heavier than other stages (an embedding, a large vocabulary),
    groups that differ in memory, and other placements. There are no formulas: bubble and memory follow
    from the order that is found. 16 groups and 256 microbatches take about a second.

    Attributes:
      times: the times of tasks and messages.
      memory_limit: the most forwards that a group may have in flight, from the start of the forward to the
        end of its backward: a number for all groups, one for each, or ``None`` for no limit. The forward of
        a stage on one slice counts as one.
      split_backward: whether a backward is a ``bwdA`` and a ``bwdW``.
      slices: the number of slices that a microbatch is cut into; see ``Seq1F1B``. The times of slices of
        different work are numbers for each stage and slice.

    Raises ``TypeError`` for other types than numbers, and ``ValueError`` when numbers are missing, or when a
    limit is less than the number of the group's stages on all slices, so that no microbatch could pass.

    Source: the rules follow the scheduler of Qi et al., "Zero Bubble Pipeline Parallelism", 2023,
    arXiv:2401.10241, section 3.1.
    """

    times: TaskTimes = UNIT_TIMES
    memory_limit: int | Sequence[int] | None = None
    split_backward: bool = True
    slices: int = 1

    __repr__ = Schedule.__repr__

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_sequence(limit := self.memory_limit):
            object.__setattr__(self, "memory_limit", tuple(limit))
        name = f"{self.name}'s memory_limit"
        raise_faults(
            type_fault(f"{self.name}'s times", self.times, TaskTimes, "TaskTimes"),
            bool_fault(f"{self.name}'s split_backward", self.split_backward),
            *(int_faults(name, limit) if is_sequence(limit) else [int_fault(name, limit, optional=True)]),
        )
        if faults := [*self._faults()]:
            raise ValueError(f"{self.name} cannot be made: {'; '.join(faults)}")

    def _faults(self) -> Iterator[str]:
        for field in dataclasses.fields(self.times):
            value = getattr(self.times, field.name)
            if isinstance(value, tuple) and len(value) != self.num_stages * self.slices:
                yield f"times.{field.name} has {len(value)} numbers for {self._stages_text(self.num_stages)}"
        if len(self._limits) != self.mpmd_dim:
            yield f"memory_limit has {len(self._limits)} numbers for {self.mpmd_dim} groups"
        for mpmd_idx, limit in enumerate(self._limits):
            stages = self.placement.count(mpmd_idx)
            if limit < stages * self.slices:
                has = self._stages_text(stages)
                yield f"memory_limit of group {mpmd_idx} is {limit}, and it has {has}"

    def _stages_text(self, stages: int) -> str:
        return f"{stages} stages" + (f" on {self.slices} slices" if self.slices > 1 else "")

    @property
    def _limits(self) -> tuple[float, ...]:
        if isinstance(self.memory_limit, Sequence):
            return tuple(self.memory_limit)
        return (math.inf if self.memory_limit is None else self.memory_limit,) * self.mpmd_dim

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        timed = []
        for schedule in self._handmade():
            lists = schedule.tasks(num_microbatches)
            if all(map(operator.le, _peaks(lists), self._limits)):
                order = by_position(lists, self.numbers)
                timed.append((lists, self._run(num_microbatches, in_order(order))[1]))
        rules = [_greedy(self._limits, alternate, self.slices) for alternate in (True, False)]
        timed += [self._run(num_microbatches, rule) for rule in rules]
        return min(timed, key=lambda pair: (pair[1], sum(_peaks(pair[0]))))[0]

    def _run(self, num_microbatches: int, choose: DispatchRule) -> tuple[list[list[Cell]], float]:
        backward: TaskKind = "bwdA" if self.split_backward else "bwd"
        return dispatch(self.placement, num_microbatches, choose, self.times, backward, self.slices)

    def _handmade(self) -> Iterator[Schedule]:
        """The handmade schedules with this placement, also those over the limit of memory."""
        stages, groups, slices, split = self.num_stages, self.mpmd_dim, self.slices, self.split_backward
        if split and slices == 1 and self.placement == v_shape(groups):
            yield from (ZeroBubbleV(stages, groups), VHalf(stages, groups), VMin(stages, groups))
        if stages % groups or self.placement != round_robin(stages, groups):
            return
        if slices > 1:
            yield from (Seq1F1B(stages, slices, groups, eager, split) for eager in (False, True))
        elif split:
            yield InterleavedZeroBubble(stages, groups)
        else:
            yield from (Interleaved1F1B(stages, groups), InterleavedGPipe(stages, groups))
        if stages == groups:
            if not split:
                yield GPipe(stages, slices) if slices > 1 else Std1F1B(stages)
            elif slices == 1:
                # ZB-H2 needs at least the memory of ZB-H1. With less memory it does not fit, and is dropped.
                yield ZeroBubbleH2(stages, int(max(stages, min(*self._limits, 2 * stages - 1))))


def _greedy(limits: tuple[float, ...], alternate: bool, slices: int) -> DispatchRule:
    """Prefers backwards, then forwards, then weight gradients; if ``alternate``, a forward after a backward.

    Of several backwards the oldest runs, to free memory; of several forwards, the last stage's. Where a
    forward is due and waits for memory, weight gradients, which free memory, come before backwards.
    """

    def choose(group: GroupState) -> Task | None:
        ready = group.ready("fwd")
        forward = next((task for task in reversed(ready) if _may_start(task, group, limits, slices)), None)
        backwards = group.ready("bwd") + group.ready("bwdA")
        backward = min(backwards, key=lambda task: (task.microbatch, task.stage), default=None)
        weights = group.weights[0] if group.weights else None
        if alternate and _last_kind(group) != "fwd":
            return forward or (weights if ready else None) or backward or weights
        return backward or forward or weights

    return choose


def _may_start(forward: Task, group: GroupState, limits: tuple[float, ...], slices: int) -> bool:
    # The oldest microbatch can pass if each stage after this one can still hold what is left of a microbatch,
    # and this one the rest of the slices.
    end = forward.microbatch - forward.microbatch % slices + slices
    left = (end - group.started["fwd", stage] for stage in group.stages if stage > forward.stage)
    reserved = sum(min(slices, slices_left) for slices_left in left) + end - 1 - forward.microbatch
    return group.in_flight + reserved < limits[group.mpmd_idx]


def _last_kind(group: GroupState) -> str | None:
    kinds = (task.kind for cell in reversed(group.tasks) for task in cell.tasks)
    return next((kind for kind in kinds if kind != "bwdW"), None)


def _peaks(lists: list[list[Cell]]) -> list[int]:
    """The most stages' microbatches that each group has in flight."""
    change = {"fwd": 1, "bwd": -1, "bwdA": 0, "bwdW": -1}
    return [
        max(itertools.accumulate(change[task.kind] for cell in cells for task in cell.tasks))
        for cells in lists
    ]
