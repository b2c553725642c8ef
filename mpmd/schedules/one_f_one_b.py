"""1F1B: after a warm-up, forwards and backwards alternate."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mpmd.ir.plan import Cell
from mpmd.schedules.base import OneStagePerGroup, check_num_microbatches
from mpmd.schedules.orders import in_turn
from mpmd.validation import bool_fault, raise_faults


@dataclasses.dataclass(frozen=True)
class _Alternating(OneStagePerGroup):
    """1F1B with ``_forwards_per_hop`` forwards in the warm-up for each hop to the last group."""

    fuse_steady_state: bool = dataclasses.field(default=False, repr=False)

    _forwards_per_hop: ClassVar[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_faults(bool_fault(f"{self.name}'s fuse_steady_state", self.fuse_steady_state))

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        rounds, hops = [range(num_microbatches)], reversed(range(self.num_stages))
        return [
            in_turn([stage], rounds, self._forwards_per_hop * hops_to_last, fused=self.fuse_steady_state)
            for stage, hops_to_last in enumerate(hops)
        ]


@dataclasses.dataclass(frozen=True)
class Std1F1B(_Alternating):
    """Runs a backward as soon as there is one, so that few microbatches are in flight.

    Stage ``i`` of ``p`` warms up with ``p - 1 - i`` forwards, then alternates. With ``m`` microbatches:

    - bubble: ``(p - 1) / (m + p - 1)`` of the step, as in GPipe;
    - memory: the residuals of ``min(p - i, m)`` microbatches on stage ``i``.

    After the warm-up a group waits for messages of its neighbours with every microbatch, so that the cost of
    a latency grows with the number of microbatches; see ``Eager1F1B``.

    Attributes:
      fuse_steady_state: whether a forward and the backward after it are one task. Here groups wait longer for
        it.

    Source: the PipeDream-Flush schedule, Narayanan et al., "Efficient Large-Scale Language Model Training
    on GPU Clusters Using Megatron-LM", 2021, arXiv:2104.04473, section 2.2.1.
    """

    _forwards_per_hop: ClassVar[int] = 1


@dataclasses.dataclass(frozen=True)
class Eager1F1B(_Alternating):
    """1F1B with a warm-up twice as long, so that messages travel while other tasks run.

    Stage ``i`` of ``p`` warms up with ``2 (p - 1 - i)`` forwards, then alternates. With ``m`` microbatches:

    - bubble: ``(p - 1) / (m + p - 1)`` of the step, as in GPipe; a latency between groups costs time once per
      hop there and back, and not once per microbatch;
    - memory: the residuals of ``min(2 (p - i) - 1, m)`` microbatches on stage ``i``.

    Attributes:
      fuse_steady_state: whether a forward and the backward after it are one task, which XLA may overlap; no
        task waits more.

    Source: Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2022, arXiv:2211.05322
    (eager-1F1B).
    """

    _forwards_per_hop: ClassVar[int] = 2
