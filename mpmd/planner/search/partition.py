"""Cuts layers into stages by dynamic programming, for groups with given devices.

It minimises, over the groups of a pipeline with one stage each,

    max over groups g:  (time until the first microbatch reaches g) + m T_g + (time from g back to the start)

where ``T_g`` is the time of the forward and backward of a microbatch on ``g``: no schedule is shorter.
From the last stage backwards this is one number for each first layer, ``V``. A stage with all behind it takes
``max(m T, T + 2 c + V)``, which never falls as ``V`` rises.

The dynamic programme of Alpa minimises ``sum T + (m - 1) max T`` instead (Zheng et al., "Alpa: Automating
Inter- and Intra-Operator Parallelism for Distributed Deep Learning", 2022, arXiv:2201.12023, section 5.2).
Its limit for the slowest stage is here, too: the cuts for several limits are simulated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from mpmd.planner.search.layer_arrays import Array
from mpmd.planner.search.stages import Table

SLACKS = (1.0, 1.1, math.inf)
"""Limits for the slowest stage of a cut, as multiples of the slowest stage of the most balanced cut."""


@dataclasses.dataclass(frozen=True)
class StageRangeCosts:
    """Costs of ranges of layers as stages: of layers ``i`` to ``j - 1`` at ``[i, j]``.

    Attributes:
      seconds: seconds of forward and backward of a microbatch; infinite for no layers.
      held: bytes of weights, gradients, state, the largest temporaries and messages.
      residuals: bytes of residuals of a microbatch.
      hops: by first layer, seconds of messages to the previous stage and back.
      of_other_policies: costs by other policies of rematerialisation that the stage may have instead.
    """

    seconds: Array
    held: Array
    residuals: Array
    hops: Array
    of_other_policies: tuple[StageRangeCosts, ...] = ()

    @staticmethod
    def of(table: Table, overhead: float, hops: Array) -> StageRangeCosts:
        """Returns the costs of all ranges of a table's layers; ``overhead`` is the seconds of overhead of
        the tasks of a microbatch."""

        def between(*names: str) -> Array:
            until = np.sum([table.until[name] for name in names], axis=0)
            return until[None, :] - until[:, None]

        seconds = between("forward", "backward") + overhead
        seconds[np.tril_indices(len(seconds))] = math.inf
        most = _largest(table.layers["temporaries"])
        entering = np.append(table.layers["entering"], 0.0)
        messages = 2 * (entering[:, None] + entering[None, :])
        return StageRangeCosts(
            seconds=seconds,
            held=between("weights", "gradients", "state") + most + messages,
            residuals=between("residuals"),
            hops=hops,
        )

    def fitting(self, in_flight: float, memory: float) -> Array:
        """The seconds of each range by the fastest policy with which it fits, infinite where none does."""
        fits = self.held + in_flight * self.residuals <= memory
        others = (costs.fitting(in_flight, memory) for costs in self.of_other_policies)
        return functools.reduce(np.minimum, others, np.where(fits, self.seconds, math.inf))


def cuts(
    range_costs: Sequence[StageRangeCosts],
    in_flight: Sequence[float],
    num_microbatches: int,
    memory: Sequence[float],
) -> Iterator[tuple[int, ...]]:
    """Ways to cut the layers, as the numbers of layers of each stage; none if none fits.

    Args:
      range_costs: for each stage, of ranges of layers on its group.
      in_flight: for each stage the microbatches whose residuals it holds.
      memory: for each stage the bytes that it may need on a device.
    """
    seconds = [costs.fitting(*limits) for costs, *limits in zip(range_costs, in_flight, memory, strict=True)]
    hops = [costs.hops for costs in range_costs]
    balanced = _slowest(seconds)
    if math.isinf(balanced):
        return
    yielded = set()
    for slack in SLACKS:
        cut = _shortest(seconds, hops, num_microbatches, slack * balanced * (1 + 1e-9))
        if cut not in yielded:
            yielded.add(cut)
            yield cut


def unevenness(values: Array) -> Array:
    """The sum of the largest stage over the mean of all stages, in the most even cut, by number of stages.

    Entry ``i`` is for ``i + 1`` stages.
    """
    until = np.concatenate([[0.0], np.cumsum(values)])
    if not until[-1]:
        return np.ones(len(values))
    sums = until[None, :] - until[:, None]
    sums[np.tril_indices(len(sums))] = math.inf
    best = np.where(np.arange(len(until)) == len(values), 0.0, math.inf)
    most = []
    for _ in values:
        best = np.maximum(sums, best[None, :]).min(axis=1)
        most.append(best[0])
    return np.array(most) * np.arange(1, len(values) + 1) / until[-1]


def _slowest(seconds: list[Array]) -> float:
    """The least time of the slowest stage."""
    num_layers = len(seconds[0]) - 1
    best = np.full(num_layers + 1, math.inf)
    best[num_layers] = 0.0
    for of_stage in reversed(seconds):
        best = np.maximum(of_stage, best[None, :]).min(axis=1)
    return float(best[0])


def _shortest(
    seconds: list[Array], hops: list[Array], num_microbatches: int, limit: float
) -> tuple[int, ...]:
    """The cut with the shortest step in which no stage takes longer than ``limit`` seconds."""
    num_layers = len(seconds[0]) - 1
    best = np.full(num_layers + 1, math.inf)
    best[num_layers] = 0.0
    behind, choices = best, []
    for of_stage, hop in zip(reversed(seconds), reversed(hops), strict=True):
        of_stage = np.where(of_stage <= limit, of_stage, math.inf)
        steps = np.maximum(num_microbatches * of_stage, of_stage + behind[None, :])
        choices.append(steps.argmin(axis=1))
        best = steps.min(axis=1)
        behind = best + hop
    assert math.isfinite(best[0]), "the limit allows a cut"
    bounds = [0]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))


def _largest(values: Array) -> Array:
    """The largest of values ``i`` to ``j - 1`` at ``[i, j]``; 0 for an empty range."""
    largest = np.zeros((len(values) + 1, len(values) + 1))
    for first in range(len(values)):
        largest[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return largest
