"""Interleaved 1F1B: several stages per group, for a shorter bubble."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mpmd.ir.plan import Cell
from mpmd.schedules.base import RoundRobin, check_num_microbatches
from mpmd.schedules.orders import fuse_forward_with_backward, in_turn, rounds_of
from mpmd.validation import bool_fault, raise_faults


@dataclasses.dataclass(frozen=True)
class Interleaved1F1B(RoundRobin):
    """Group ``i`` of ``p`` runs the ``v`` stages ``i, i + p, i + 2 p, ...``, in rounds of microbatches.

    In a round of ``R`` microbatches a group runs all their forwards on its first stage, then on its second
    stage, and so on; it runs the backwards on its last stage first. The last stage of the model runs each
    forward and its backward as one task. With ``m`` microbatches there are ``m // p`` rounds (at least one),
    as equal as possible, the longer ones first:

    - bubble, ``m >= p``: ``(p - 1) / (v m + p - 1)`` of the step, for every ``m``;
    - step, ``m < p``: as long as ``m + v p - 1`` forwards and backwards of one stage;
    - memory: the residuals of ``min(v m, (v - 1) R + 2 (p - 1 - i) + 1)`` stages' microbatches on group
      ``i``, ``R`` being the length of the first round; each is ``v`` times smaller than with one stage per
      group.

    Raises ``ValueError`` when ``num_stages`` is not a multiple of ``mpmd_dim``.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", 2021, arXiv:2104.04473, section 2.2.2, which asks for ``m`` to be a multiple of ``p``.
    """

    fuse_steady_state: bool = dataclasses.field(default=False, repr=False)
    """Whether a forward and the backward after it are one task, which XLA may overlap; no task waits more."""

    extra_warmup: ClassVar[int] = 0
    """The number of forwards that each group runs earlier than it must."""

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_faults(bool_fault(f"{self.name}'s fuse_steady_state", self.fuse_steady_state))

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        rounds = rounds_of(num_microbatches, self.mpmd_dim)
        groups = [
            # Each hop from a group to the last one and back gives time for one more forward.
            in_turn(self.stages_of(i), rounds, 2 * hops + self.extra_warmup, fused=self.fuse_steady_state)
            for i, hops in enumerate(reversed(range(self.mpmd_dim)))
        ]
        return [*groups[:-1], fuse_forward_with_backward(groups[-1], self.num_stages - 1)]


@dataclasses.dataclass(frozen=True)
class KimiK2(Interleaved1F1B):
    """``Interleaved1F1B`` with one more forward in the warm-up of every group.

    So each forward and the backward next to it in the list belong to different microbatches, on the last
    group too, and the communication of either task (such as the all-to-all of a mixture of experts) can run
    beside the computation of the other task. The last stage runs each forward and the backward after it as
    one task. Bubble and step are as in ``Interleaved1F1B``; memory is one stage's microbatch more, up to
    ``v m``.

    Raises ``ValueError`` when ``num_stages`` is not a multiple of ``mpmd_dim``.

    Source: Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025, arXiv:2507.20534, section 2.4.2.
    """

    extra_warmup: ClassVar[int] = 1
