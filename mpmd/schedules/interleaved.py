"""Interleaved 1F1B: several stages per group, for a shorter bubble."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from mpmd.ir import Cell
from mpmd.schedules.base import Schedule, check_num_microbatches
from mpmd.schedules.orders import fuse_forward_with_backward, merge, tasks_of


@dataclasses.dataclass(frozen=True)
class Interleaved1F1B(Schedule):
    """Group ``i`` of ``p`` runs the ``v`` stages ``i, i + p, i + 2 p, ...``, in rounds of microbatches.

    In a round of ``R`` microbatches a group runs the forwards of all of them on its first stage, then on its
    second, and so on; the backwards the other way round. The last stage runs each forward and its backward
    as one task. With ``m`` microbatches there are ``m // p`` rounds (at least one), as equal as can be,
    the longer ones first:

    - bubble, ``m >= p``: ``(p - 1) / (v m + p - 1)`` of the step, for every ``m``;
    - step, ``m < p``: as long as ``m + v p - 1`` forwards and backwards of one stage;
    - memory: the residuals of ``min(v m, (v - 1) R + 2 (p - 1 - i) + 1)`` stages' microbatches on group
      ``i``, ``R`` being the length of the first round; each is ``v`` times smaller than with one stage per
      group.

    Raises ``ValueError`` when ``num_stages`` is not a multiple of ``mpmd_dim``.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", 2021, arXiv:2104.04473, section 2.2.2, which asks for ``m`` to be a multiple of ``p``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_stages % self.mpmd_dim:
            sizes = ", ".join(str(v * self.mpmd_dim) for v in (1, 2, 3))
            raise ValueError(
                f"{self.name} places equally many stages on each group: mpmd_dim={self.mpmd_dim} takes "
                f"num_stages={sizes}, ..., got num_stages={self.num_stages}"
            )

    @property
    def stages_per_group(self) -> int:
        """The ``v`` of the formulas."""
        return self.num_stages // self.mpmd_dim

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        rounds = _rounds(num_microbatches, self.mpmd_dim)
        groups = [self._group_tasks(mpmd_idx, rounds) for mpmd_idx in range(self.mpmd_dim)]
        return [*groups[:-1], fuse_forward_with_backward(groups[-1], self.num_stages - 1)]

    def _group_tasks(self, mpmd_idx: int, rounds: list[range]) -> list[Cell]:
        stages = range(mpmd_idx, self.num_stages, self.mpmd_dim)
        forwards = [task for part in rounds for task in tasks_of("fwd", stages, part)]
        backwards = [task for part in rounds for task in tasks_of("bwd", reversed(stages), part)]
        # The hops from here to the last group and back, each of them time for one more forward.
        ahead = 2 * (self.mpmd_dim - 1 - mpmd_idx)
        counts = _forwards_before(rounds, self.stages_per_group)
        return merge(forwards, backwards, (count + ahead for count in counts))


def _rounds(num_microbatches: int, mpmd_dim: int) -> list[range]:
    # A round shorter than the number of groups would leave the first group waiting for the last one.
    count = max(1, num_microbatches // mpmd_dim)
    size, longer = divmod(num_microbatches, count)
    sizes = [size + 1] * longer + [size] * (count - longer)
    bounds = itertools.accumulate(sizes, initial=0)
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _forwards_before(rounds: list[range], stages_per_group: int) -> Iterator[int]:
    """How many forwards precede each backward on the last group.

    A round's first backward needs the round's forwards on all the group's stages but the last one. From
    there each backward follows a forward, the last stage's its own, until the forwards that the next round
    needs are done; a round longer than the next has backwards left over then, which run alone.
    """
    firsts = [stages_per_group * part.start + (stages_per_group - 1) * len(part) for part in rounds]
    ends = [*firsts[1:], stages_per_group * rounds[-1].stop]
    for part, first, end in zip(rounds, firsts, ends, strict=True):
        for index in range(stages_per_group * len(part)):
            yield min(first + index + 1, end)
