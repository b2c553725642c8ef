"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

import dataclasses

from mpmd.ir.plan import Cell
from mpmd.schedules.base import OneStagePerGroup, RoundRobin, Schedule, check_num_microbatches
from mpmd.schedules.orders import in_rounds, on_slices, rounds_of, tasks_of


@dataclasses.dataclass(frozen=True)
class GPipe(OneStagePerGroup):
    """Every group runs the forwards of all ``m`` microbatches, then their backwards.

    This is the simplest schedule, and needs the most memory. With ``p`` stages:

    - bubble: ``(p - 1) / (m + p - 1)`` of the step, with ``S`` slices ``(p - 1) / (m S + p - 1)``;
    - memory: the residuals of all ``m`` microbatches on every group.

    Attributes:
      slices: ``S``, the number of slices that a microbatch is cut into; see ``Seq1F1B``. The forwards of a
        microbatch run in ascending order of slices, the backwards in descending order.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2018, arXiv:1811.06965, section 2.
    """

    slices: int = 1

    __repr__ = Schedule.__repr__

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        positions = range(num_microbatches * self.slices)
        return on_slices(
            [
                tasks_of("fwd", [stage], positions) + tasks_of("bwd", [stage], positions)
                for stage in range(self.num_stages)
            ],
            self.numbers,
        )


@dataclasses.dataclass(frozen=True)
class InterleavedGPipe(RoundRobin):
    """GPipe with several stages per group, in the rounds of ``Interleaved1F1B``.

    It suits few microbatches, or rematerialisation, when all residuals fit. With ``p`` groups, ``v`` stages
    on each and ``m`` microbatches:

    - bubble, ``m >= p``: ``(p - 1) / (v m + p - 1)`` of the step;
    - step, ``m < p``: as long as ``m + v p - 1`` forwards and backwards of one stage;
    - memory: the residuals of all ``v m`` stages' microbatches on every group.

    Every round waits for messages to go round the groups, unlike ``LoopedBFS``. Raises ``ValueError`` when
    ``num_stages`` is not a multiple of ``mpmd_dim``.

    Source: GPipe (see there) on the placement of Narayanan et al., "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM", 2021, arXiv:2104.04473, section 2.2.2.
    """

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        rounds = self._rounds(num_microbatches)
        return [
            in_rounds("fwd", stages, rounds) + in_rounds("bwd", stages[::-1], rounds)
            for stages in map(self.stages_of, range(self.mpmd_dim))
        ]

    def _rounds(self, num_microbatches: int) -> list[range]:
        return rounds_of(num_microbatches, self.mpmd_dim)


@dataclasses.dataclass(frozen=True)
class LoopedBFS(InterleavedGPipe):
    """Breadth first: each group runs all microbatches on one of its stages before it turns to the next.

    Bubble and memory are as in ``InterleavedGPipe``. A stage uses its weights in one stretch of the
    forward and in one of the backward, and completes its gradient early. This suits weights that are gathered
    for use (fully sharded data parallelism), and gradients that are reduced while other stages run. A latency
    of ``c`` per message, up to half a forward, adds ``2 (p - 1) c`` for ``m >= 2 p - 1``.

    Raises ``ValueError`` when ``num_stages`` is not a multiple of ``mpmd_dim``.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022, arXiv:2211.05953.
    """

    def _rounds(self, num_microbatches: int) -> list[range]:
        return [range(num_microbatches)]
