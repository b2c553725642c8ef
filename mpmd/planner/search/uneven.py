"""Finds groups of different sizes, by a dynamic programme over layers and numbers of devices.

As Alpa's (arXiv:2201.12023, section 5.2) it gives each stage a run of layers and a submesh, but it minimises
the bound of ``partition.py``, which counts filling and draining. ``V[i, d]`` is the bound for the layers
from ``i`` on, on ``d`` devices, in ``s`` stages. A stage holds as many microbatches as in 1F1B, which follows
from the stages behind it; other schedules get the same submeshes, and their own cuts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from mpmd.planner.candidate import Candidate
from mpmd.planner.collectives import DeviceRange, message_link
from mpmd.planner.search.layer_arrays import Array
from mpmd.planner.search.partition import StageRangeCosts
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.submesh import Submesh

MOST_LAYERS = 40
"""Number of layers to which a model with more layers is merged; the first and the last layer stay separate.
"""

MOST_UNITS = 32
"""The most units in which devices are assigned to groups."""

MOST_STAGES = 32
OPTIONS_PER_SIZE = 2
MOST_RESULTS = 3


@dataclasses.dataclass(frozen=True)
class _Option:
    """A submesh that a group may have.

    Attributes:
      units: the number of units of devices.
      range_costs: of ranges of merged layers.
      step: by first and last layer, seconds of a step outside the loop.
    """

    submesh: Submesh
    units: int
    range_costs: StageRangeCosts
    step: Array


def uneven_submeshes(space: SearchSpace, candidate: Candidate) -> list[tuple[Submesh, ...]]:
    """The most promising submeshes of groups of different sizes, for different numbers of groups.

    Args:
      candidate: with the settings of all groups, and with the pool in which they are.
    """
    pool = space.model.cluster.pool(candidate.submeshes[0].pool)
    bounds = _bounds_of_layers(len(space.profile.layers))
    unit = _unit(pool.num_devices)
    options = _options(space, candidate, unit, bounds)
    if len({option.units for option in options}) < 2:
        return []
    most = min(len(bounds) - 1, pool.num_devices // unit, MOST_STAGES)
    numbers = (
        range(1, most + 1) if space.constraints.groups is None else range(1, space.constraints.groups + 1)
    )
    values: list[tuple[float, tuple[Submesh, ...]]] = []
    units = pool.num_devices // unit
    for value, chosen in _programme(space, candidate, options, units, len(bounds) - 1, numbers):
        submeshes = tuple(option.submesh for option in chosen)
        is_allowed = space.constraints.groups in (None, len(submeshes))
        if is_allowed and any(submesh != submeshes[0] for submesh in submeshes):
            values.append((value, submeshes))
    return [submeshes for _, submeshes in sorted(values, key=lambda pair: pair[0])[:MOST_RESULTS]]


def _programme(
    space: SearchSpace,
    candidate: Candidate,
    options: list[_Option],
    units: int,
    num_layers: int,
    numbers: range,
) -> Iterator[tuple[float, list[_Option]]]:
    """Yields, for each number of stages, the bound of the seconds of the step and the options of its
    stages."""
    best = np.full((num_layers + 1, units + 1), math.inf)
    best[num_layers] = 0.0
    behind, choices = best, []
    for number in numbers:
        in_flight = min(number, candidate.num_microbatches)
        of_options = [_with_option(space, candidate, option, in_flight, behind) for option in options]
        values = np.stack([value for value, _ in of_options])
        option_of = values.argmin(axis=0)
        stops = np.take_along_axis(np.stack([stop for _, stop in of_options]), option_of[None], axis=0)[0]
        best = np.take_along_axis(values, option_of[None], axis=0)[0]
        # The message into a stage goes at the pace of the best link that any option has.
        hops = np.min([option.range_costs.hops for option in options], axis=0)
        behind = best + hops[:, None]
        choices.append((option_of, stops))
        if math.isfinite(best[0, units]):
            yield float(best[0, units]), _chosen(options, choices, units)


def _with_option(
    space: SearchSpace, candidate: Candidate, option: _Option, in_flight: int, behind: Array
) -> tuple[Array, Array]:
    """By first layer and number of units: the bound with an option, and the first layer behind its stage."""
    memory = space.model.cluster.pool(option.submesh.pool).memory
    seconds = option.range_costs.fitting(in_flight, memory)
    units = behind.shape[1]
    left = np.full_like(behind, math.inf)
    left[:, option.units :] = behind[:, : units - option.units]
    busy = candidate.num_microbatches * seconds + option.step
    totals = np.maximum(busy[:, :, None], seconds[:, :, None] + left[None, :, :])
    stops = totals.argmin(axis=1)
    return np.take_along_axis(totals, stops[:, None, :], axis=1)[:, 0, :], stops


def _chosen(options: list[_Option], choices: list[tuple[Array, Array]], units: int) -> list[_Option]:
    first, chosen = 0, []
    for option_of, stops in reversed(choices):
        option = options[option_of[first, units]]
        first, units = int(stops[first, units]), units - option.units
        chosen.append(option)
    return chosen


def _unit(devices: int) -> int:
    """The number of devices of a unit, so that ``devices`` devices are at most ``MOST_UNITS`` units."""
    return next(
        unit for unit in range(1, devices + 1) if devices % unit == 0 and devices // unit <= MOST_UNITS
    )


def _bounds_of_layers(num_layers: int) -> list[int]:
    """The first layers of merged layers, and the number of layers."""
    if num_layers <= MOST_LAYERS:
        return [*range(num_layers + 1)]
    inner = np.linspace(2, num_layers - 2, MOST_LAYERS - 3).round().astype(int)
    return [0, 1, *(int(bound) for bound in inner), num_layers - 1, num_layers]


def _options(space: SearchSpace, candidate: Candidate, unit: int, bounds: list[int]) -> list[_Option]:
    """For each number of devices, the submeshes with the least work and the submesh with the least memory."""
    by_size: dict[int, list[tuple[float, float, Submesh]]] = {}
    pool, number = candidate.submeshes[0].pool, candidate.num_microbatches
    for submesh in space.submeshes:
        size = submesh.num_devices
        if (
            submesh.pool == pool
            and size % unit == 0
            and space.profile.rows // candidate.num_microbatches % submesh.data == 0
            and (not candidate.sequence_parallel or space.divides_between_regions(submesh, number))
        ):
            table = _table(space, candidate, submesh)
            work = float(table.until["forward"][-1] + table.until["backward"][-1])
            held = float(table.until["weights"][-1] + table.until["state"][-1] + table.until["gradients"][-1])
            by_size.setdefault(size, []).append((work, held, submesh))
    chosen = []
    for submeshes in by_size.values():
        by_work = sorted(submeshes, key=lambda entry: entry[0])[:OPTIONS_PER_SIZE]
        least = min(submeshes, key=lambda entry: entry[1])
        chosen += [submesh for _, _, submesh in (*by_work, *([] if least in by_work else [least]))]
    return [_option(space, candidate, submesh, unit, bounds) for submesh in chosen]


def _option(
    space: SearchSpace, candidate: Candidate, submesh: Submesh, unit: int, bounds: list[int]
) -> _Option:
    size = submesh.num_devices
    device_range = DeviceRange(0, submesh)
    link = message_link(space.model.cluster, device_range, DeviceRange(size, submesh))
    whole = space.range_costs(space.model.group_settings(device_range, candidate), link)
    rows = np.ix_(bounds, bounds)
    range_costs = StageRangeCosts(
        whole.seconds[rows], whole.held[rows], whole.residuals[rows], whole.hops[bounds]
    )
    until = _table(space, candidate, submesh).until["step"][bounds]
    return _Option(submesh, size // unit, range_costs, until[None, :] - until[:, None])


def _table(space: SearchSpace, candidate: Candidate, submesh: Submesh):
    group_settings = space.model.group_settings(DeviceRange(0, submesh), candidate)
    return space.model.table(group_settings)
