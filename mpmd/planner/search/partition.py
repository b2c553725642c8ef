"""Cuts layers into stages, by one dynamic programme for groups with given devices and for open ones.

It minimises, over the groups of a pipeline with one stage each,

    max over groups g:  (time until the first microbatch reaches g) + busy_g + (time from g back to the start)

where ``busy_g`` is the time of all microbatches on ``g``, forward and backward: no schedule is shorter. From
the last stage backwards this is one number ``V[i, d]`` for the layers from ``i`` on, on ``d`` devices. With a
stage before them, which takes ``T`` for a microbatch and ``c`` for a message, it is
``max(busy, T + 2 c + V)``, which never falls as ``V`` rises.

The dynamic programme of Alpa minimises ``sum T + (m - 1) max T`` instead (Zheng et al., "Alpa: Automating
Inter- and Intra-Operator Parallelism for Distributed Deep Learning", 2022, arXiv:2201.12023, section 5.2).
Its limit for the slowest stage is here, too: the cuts for several limits are simulated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpmd.planner.search.layer_arrays import Array
from mpmd.planner.search.stages import LayerTable

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
    def of(table: LayerTable, overhead: float, hops: Array) -> StageRangeCosts:
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

    def merged(self, bounds: list[int]) -> StageRangeCosts:
        """The costs of ranges that begin and end at these layers."""
        rows = np.ix_(bounds, bounds)
        return StageRangeCosts(self.seconds[rows], self.held[rows], self.residuals[rows], self.hops[bounds])

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
    *_, balanced = _slowest(seconds[::-1])
    if math.isinf(balanced):
        return
    yielded = set()
    for slack in SLACKS:
        limited = [
            np.where(of_stage <= slack * balanced * (1 + 1e-9), of_stage, math.inf) for of_stage in seconds
        ]
        options = [
            [GroupOption(of_stage, num_microbatches * of_stage, hop)]
            for of_stage, hop in zip(limited, hops, strict=True)
        ]
        *_, shortest = programme(reversed(options), 0)
        assert shortest is not None, "the limit allows a cut"
        cut = tuple(number for _, number in shortest.stages)
        if cut not in yielded:
            yielded.add(cut)
            yield cut


class GroupOption(NamedTuple):
    """A group on which a stage may run; of layers ``i`` to ``j - 1`` at ``[i, j]``.

    Attributes:
      seconds: seconds of forward and backward of a microbatch; infinite for layers that do not fit.
      busy: seconds of forward and backward of all microbatches, and of the step outside the loop.
      hops: by first layer, seconds of messages to the previous stage and back.
      units: the number of units of devices; 0 where all groups are given.
    """

    seconds: Array
    busy: Array
    hops: Array
    units: int = 0


class Partition(NamedTuple):
    """Stages for all layers.

    Attributes:
      seconds: the bound of the seconds of a step.
      stages: for each stage, the position of its group among the options, and its number of layers.
    """

    seconds: float
    stages: list[tuple[int, int]]


def programme(stages: Iterable[Sequence[GroupOption]], units: int) -> Iterator[Partition | None]:
    """Yields the shortest partition into one stage, two stages, and so on; ``None`` where none fits.

    Args:
      stages: the options of each stage, from the last stage on.
      units: the units of devices that all stages use.
    """
    choices: list[tuple[Sequence[GroupOption], Array, Array]] = []
    behind = np.empty((0, 0))
    for options in stages:
        if not choices:
            behind = np.full((len(options[0].hops), units + 1), math.inf)
            behind[-1] = 0.0
        tried = [_with_option(option, behind) for option in options]
        values = np.stack([value for value, _ in tried])
        chosen = values.argmin(axis=0)
        best = np.take_along_axis(values, chosen[None], axis=0)[0]
        stops = np.take_along_axis(np.stack([stop for _, stop in tried]), chosen[None], axis=0)[0]
        choices.append((options, chosen, stops))
        # The message into a stage goes at the pace of the best link that any option has.
        behind = best + np.min([option.hops for option in options], axis=0)[:, None]
        seconds = float(best[0, units])
        yield Partition(seconds, _chosen(choices, units)) if math.isfinite(seconds) else None


def _with_option(option: GroupOption, behind: Array) -> tuple[Array, Array]:
    """By first layer and number of units: the bound with an option, and the first layer behind its stage."""
    left = behind
    if option.units:
        left = np.full_like(behind, math.inf)
        left[:, option.units :] = behind[:, : behind.shape[1] - option.units]
    totals = np.maximum(option.busy[:, :, None], option.seconds[:, :, None] + left[None, :, :])
    stops = totals.argmin(axis=1)
    return np.take_along_axis(totals, stops[:, None, :], axis=1)[:, 0, :], stops


def _chosen(choices: list[tuple[Sequence[GroupOption], Array, Array]], units: int) -> list[tuple[int, int]]:
    first, stages = 0, []
    for options, option_of, stops in reversed(choices):
        option, stop = int(option_of[first, units]), int(stops[first, units])
        stages.append((option, stop - first))
        first, units = stop, units - options[option].units
    return stages


def unevenness(values: Array) -> Array:
    """The sum of the largest stage over the mean of all stages, in the most even cut, by number of stages.

    Entry ``i`` is for ``i + 1`` stages.
    """
    until = np.concatenate([[0.0], np.cumsum(values)])
    if not until[-1]:
        return np.ones(len(values))
    sums = until[None, :] - until[:, None]
    sums[np.tril_indices(len(sums))] = math.inf
    most = np.array([*_slowest([sums] * len(values))])
    return most * np.arange(1, len(values) + 1) / until[-1]


def _slowest(seconds: Sequence[Array]) -> Iterator[float]:
    """Yields the least time of the slowest stage, of cuts into one stage, two stages, and so on.

    Args:
      seconds: of ranges of layers as the last stage, as the last but one, and so on.
    """
    best = np.full(len(seconds[0]), math.inf)
    best[-1] = 0.0
    for of_stage in seconds:
        best = np.maximum(of_stage, best[None, :]).min(axis=1)
        yield float(best[0])


def _largest(values: Array) -> Array:
    """The largest of values ``i`` to ``j - 1`` at ``[i, j]``; 0 for an empty range."""
    largest = np.zeros((len(values) + 1, len(values) + 1))
    for first in range(len(values)):
        largest[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return largest
