"""Seq1F1B: 1F1B of slices of the sequence, for long contexts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mpmd.ir.plan import Cell, Task, TaskKind
from mpmd.schedules.base import RoundRobin, check_num_microbatches
from mpmd.schedules.orders import in_rounds, merge, on_slices, rounds_of, with_weight_gradients
from mpmd.validation import bool_fault, int_fault, raise_faults


@dataclasses.dataclass(frozen=True, init=False)
class Seq1F1B(RoundRobin):
    """1F1B in which each microbatch is cut along its sequence into ``slices``.

    A slice attends to the keys and values of the slices before it. So a group runs the forwards of a
    microbatch in ascending order of slices, and the backwards in descending order. The loss is a Python loop
    over slices, and each slice has its own marks.

    Group ``i`` of ``p`` runs the ``v`` stages ``i, i + p, i + 2 p, ...`` and warms up with
    ``p - 1 - i + S - 1`` forwards of slices, with several stages in rounds as ``Interleaved1F1B``. With ``S``
    slices of equal work and ``m`` microbatches:

    - bubble: ``(p - 1) / (v m S + p - 1)`` of the step, and ``(p - 1) / (3 v m S + p - 1)`` with split
      backwards of equal halves, if ``v`` is 1 or ``p`` divides ``m S``, and ``m S >= p``;
    - memory, one stage: the residuals of ``min(m, (S + p - 1 - i) / S)`` microbatches on group ``i``, with
      split backwards of ``min(m, (S + p - 1) / S)``;
    - memory, ``v`` stages, ``p`` divides ``S``: the residuals of at most ``min(m, 1 + 2 (p - 1) / (v S))``
      microbatches of all the group's stages;
    - a latency of ``c`` per message costs time with every slice, so ``S`` times as much as in ``Std1F1B``.

    The keys and values of a microbatch, and their gradients, come on top. Slices of equal length have equal
    work only where attention is a small share of the work.

    Attributes:
      slices: ``S``, the number of slices of each microbatch.
      eager: whether the warm-up has more forwards, so that messages travel while other tasks run: with one
        stage per group one for each hop to the last group, as in ``Eager1F1B``, and ``S + 2 (p - 1 - i)`` for
        ``S + p - 1 - i`` above; with several stages one, as in ``KimiK2``.
      split_backward: whether a backward is a ``bwdA`` and a ``bwdW``, as in ``ZeroBubble``.

    Raises ``TypeError`` for other types, and ``ValueError`` when ``num_stages`` is not a multiple of
    ``mpmd_dim``.

    Source: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model
    Training", 2024, arXiv:2406.03488. With several stages: Li et al., "SlimPipe", 2025, arXiv:2504.14519.
    """

    slices: int
    eager: bool
    split_backward: bool

    def __init__(
        self,
        num_stages: int,
        slices: int,
        mpmd_dim: int | None = None,
        eager: bool = False,
        split_backward: bool = False,
    ):
        """The schedule of ``num_stages`` stages on ``mpmd_dim`` groups; ``None``: as many as stages."""
        groups = num_stages if mpmd_dim is None else mpmd_dim
        fields = {"num_stages": num_stages, "mpmd_dim": groups, "slices": slices}
        for name, value in {**fields, "eager": eager, "split_backward": split_backward}.items():
            object.__setattr__(self, name, value)
        raise_faults(
            bool_fault(f"{self.name}'s eager", eager),
            bool_fault(f"{self.name}'s split_backward", split_backward),
        )
        self.__post_init__()

    @classmethod
    def of_size(cls, num_stages: int, mpmd_dim: int) -> Seq1F1B:
        raise_faults(int_fault(f"{cls.__name__}'s mpmd_dim", mpmd_dim))
        return cls(num_stages, slices=1, mpmd_dim=mpmd_dim)

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        positions = num_microbatches * self.slices
        # One stage has no rounds. Several take them in turn, as slices come back to the first group.
        rounds = rounds_of(positions, self.mpmd_dim) if self.stages_per_group > 1 else [range(positions)]
        lists = [self._group_tasks(mpmd_idx, rounds) for mpmd_idx in range(self.mpmd_dim)]
        return on_slices(lists, self.numbers)

    def _group_tasks(self, mpmd_idx: int, rounds: list[range]) -> list[Cell]:
        stages = self.stages_of(mpmd_idx)
        kind: TaskKind = "bwdA" if self.split_backward else "bwd"
        forwards = in_rounds("fwd", stages, rounds)
        backwards = in_rounds(kind, stages[::-1], rounds)
        hops = self.mpmd_dim - 1 - mpmd_idx
        # With rounds, each hop to the last group and back already gives time for one more forward.
        ahead = hops * (1 + self.eager) if self.stages_per_group == 1 else 2 * hops + self.eager
        counts = (count + ahead for count in self._forwards_before(forwards, backwards, stages[-1]))
        order = merge(forwards, backwards, counts)
        return with_weight_gradients(order, delay=mpmd_idx) if self.split_backward else order

    def _forwards_before(self, forwards: list[Cell], backwards: list[Cell], last: int) -> Iterator[int]:
        """The number of forwards that precede each backward on the last group.

        The first backward of a microbatch needs the forwards of all its slices. From then on each backward
        follows a forward.

        Args:
          last: the last stage of the group.
        """
        through = {task.microbatch: n for n, cell in enumerate(forwards, 1) for task in _of(cell, last)}
        count = 0
        for backward in backwards:
            (task,) = backward.tasks
            last_slice = task.microbatch - task.microbatch % self.slices + self.slices - 1
            count = max(count + 1, through[last_slice])
            yield count


def _of(cell: Cell, stage: int) -> list[Task]:
    return [task for task in cell.tasks if task.stage == stage]
