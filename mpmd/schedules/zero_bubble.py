"""Zero bubble: split backwards, whose weight gradients fill idle time."""

from __future__ import annotations

import dataclasses

from mpmd.ir.plan import Cell
from mpmd.schedules.base import OneStagePerGroup, RoundRobin, check_num_microbatches
from mpmd.schedules.orders import in_turn, rounds_of
from mpmd.validation import int_fault, raise_faults


@dataclasses.dataclass(frozen=True)
class ZeroBubble(OneStagePerGroup):
    """ZB-H1: 1F1B with split backwards, a third of its bubble and the same memory.

    A backward is a ``bwdA`` (gradient of the input, which the previous stage waits for) and a ``bwdW``
    (gradient of the weights, which no group waits for). Stage ``i`` of ``p`` runs each ``bwdW`` after the
    ``bwdA`` of ``i`` microbatches later. With ``m`` microbatches and tasks that take F, A and W:

    - bubble, ``m >= p``: ``(p - 1) max(F, A, F + A - W)`` of time, with equal tasks
      ``(p - 1) / (3 m + p - 1)`` of the step;
    - step, ``m < p``: as long as ``2 m + 2 p - 1`` equal tasks;
    - memory: the residuals of ``min(p, m)`` microbatches on every stage, of which ``min(p - i, m)`` have not
      had their ``bwdA``;
    - a latency of ``c`` per message adds at most ``4 (p - 1) c`` while ``2 c <= W``; a longer one costs time
      with every microbatch, as in ``Std1F1B``.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv:2401.10241, section 2.1 (ZB-H1).
    """

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        return _limited(self.num_stages, num_microbatches, self.num_stages)


@dataclasses.dataclass(frozen=True)
class ZeroBubbleH2(OneStagePerGroup):
    """ZB-H2: more forwards in the warm-up, so that no group idles between its first task and its last.

    The step is as long as with ``ZeroBubble``, since the last stage starts ``p - 1`` tasks late. But every
    group starts and ends one task later than the group before it: where nothing after the loop makes groups
    wait for one another, as the norm of all gradients does, steps follow each other without a bubble. With
    ``m`` microbatches, a limit of ``L`` and equal tasks:

    - idle time of a group between its first task and its last: at most ``2 p - 1 - L`` tasks, ``m >= L``;
    - memory: the residuals of ``min(L, m)`` microbatches on every stage;
    - a latency of ``c`` per message, up to the length of a task, adds ``(p - 1) c`` for the greatest ``L``
      and ``m >= L``: no other schedule hides messages so well.

    Attributes:
      memory_limit: ``L``, the microbatches in flight on a stage, from ``p`` (``ZeroBubble``) to ``2 p - 1``
        (the default); a larger limit changes nothing.

    Raises ``ValueError`` when ``memory_limit`` is less than ``num_stages``, ``TypeError`` when it is no int.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv:2401.10241, section 2.2 (ZB-H2).
    """

    memory_limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_faults(int_fault(f"{self.name}'s memory_limit", self.memory_limit, optional=True))
        if self.memory_limit is not None and self.memory_limit < self.num_stages:
            raise ValueError(
                f"{self.name} keeps at least as many microbatches in flight as there are stages: "
                f"num_stages={self.num_stages} takes memory_limit={self.num_stages} to "
                f"{2 * self.num_stages - 1}, got {self.memory_limit}; with less memory use VHalf or VMin"
            )

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        limit = self.memory_limit or 2 * self.num_stages - 1
        return _limited(self.num_stages, num_microbatches, limit)


def _limited(num_stages: int, num_microbatches: int, limit: int) -> list[list[Cell]]:
    check_num_microbatches(num_microbatches)
    # A warm-up that is longer than the step would only delay the weight gradients.
    limit = min(limit, 2 * num_stages - 1, max(num_microbatches, num_stages))
    groups = []
    for stage, hops in enumerate(reversed(range(num_stages))):
        warmup = hops + min(hops, limit - num_stages)
        groups.append(in_turn([stage], [range(num_microbatches)], warmup, delay=limit - 1 - warmup))
    return groups


@dataclasses.dataclass(frozen=True)
class InterleavedZeroBubble(RoundRobin):
    """Interleaved 1F1B with split backwards: the shortest bubble on its placement, in less memory.

    Forwards and backwards are in the rounds of ``Interleaved1F1B``, with the warm-up and the delays of
    ``ZeroBubble``. With ``p`` groups, ``v`` stages on each, ``m`` microbatches, a first round of ``R``
    microbatches, and equal tasks:

    - bubble, ``m >= p``: ``(p - 1) / (3 v m + p - 1)`` of the step, for every ``m``;
    - step, ``m < p``: as long as ``2 v p + 2 m - 1 + (v - 1) max(0, 2 m - p)`` tasks;
    - memory: the residuals of ``min(v m, (v - 1) R + p)`` stages' microbatches on every group.

    Raises ``ValueError`` when ``num_stages`` is not a multiple of ``mpmd_dim``.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv:2401.10241, on the rounds of Narayanan
    et al., 2021, arXiv:2104.04473, section 2.2.2.
    """

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        rounds = rounds_of(num_microbatches, self.mpmd_dim)
        return [
            in_turn(self.stages_of(mpmd_idx), rounds, self.mpmd_dim - 1 - mpmd_idx, delay=mpmd_idx)
            for mpmd_idx in range(self.mpmd_dim)
        ]
