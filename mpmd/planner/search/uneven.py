"""Groups of different sizes: a dynamic programme over layers and device counts.

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

from mpmd.planner.collectives import Place, Submesh, message_link
from mpmd.planner.search.layer_arrays import Array, StepSettings
from mpmd.planner.search.partition import StageRangeCosts
from mpmd.planner.search.sweep import SearchSpace

MOST_LAYERS = 40
"""More layers than these are put together for this, but for those at either end."""

MOST_UNITS = 32
"""Devices are given out in units, of which there are not more than these."""

MOST_STAGES = 32
OPTIONS_PER_SIZE = 2
MOST_RESULTS = 3


@dataclasses.dataclass(frozen=True)
class _Option:
    """A submesh that a group may have.

    Attributes:
      units: of devices.
      stretches: of layers, put together.
      step: by first and last layer, seconds of a step outside the loop.
    """

    submesh: Submesh
    units: int
    range_costs: StageRangeCosts
    step: Array


def uneven_submeshes(space: SearchSpace, settings: StepSettings) -> list[tuple[Submesh, ...]]:
    """The submeshes of groups of different sizes that promise most, for different numbers of groups."""
    bounds = _bounds_of_layers(len(space.profile.layers))
    unit = _unit(space)
    options = _options(space, settings, unit, bounds)
    if len({option.units for option in options}) < 2:
        return []
    most = min(len(bounds) - 1, space.num_devices // unit, MOST_STAGES)
    numbers = (
        range(1, most + 1) if space.constraints.groups is None else range(1, space.constraints.groups + 1)
    )
    values: list[tuple[float, tuple[Submesh, ...]]] = []
    units = space.num_devices // unit
    for value, chosen in _programme(space, settings, options, units, len(bounds) - 1, numbers):
        submeshes = tuple(option.submesh for option in chosen)
        wanted = space.constraints.groups in (None, len(submeshes))
        if wanted and any(submesh != submeshes[0] for submesh in submeshes):
            values.append((value, submeshes))
    return [submeshes for _, submeshes in sorted(values, key=lambda pair: pair[0])[:MOST_RESULTS]]


def _programme(
    space: SearchSpace,
    settings: StepSettings,
    options: list[_Option],
    units: int,
    num_layers: int,
    numbers: range,
) -> Iterator[tuple[float, list[_Option]]]:
    """For each number of stages the bound, and the submeshes of the stages."""
    best = np.full((num_layers + 1, units + 1), math.inf)
    best[num_layers] = 0.0
    behind, choices = best, []
    for number in numbers:
        in_flight = min(number, settings.num_microbatches)
        found = [_with_option(space, settings, option, in_flight, behind) for option in options]
        values = np.stack([value for value, _ in found])
        option_of = values.argmin(axis=0)
        stops = np.take_along_axis(np.stack([stop for _, stop in found]), option_of[None], axis=0)[0]
        best = np.take_along_axis(values, option_of[None], axis=0)[0]
        # The message into a stage goes at the pace of the best link that any option has.
        hops = np.min([option.range_costs.hops for option in options], axis=0)
        behind = best + hops[:, None]
        choices.append((option_of, stops))
        if math.isfinite(best[0, units]):
            yield float(best[0, units]), _chosen(options, choices, units)


def _with_option(
    space: SearchSpace, settings: StepSettings, option: _Option, in_flight: int, behind: Array
) -> tuple[Array, Array]:
    """For each first layer and number of units the bound with this option, and the first layer behind it."""
    seconds = option.range_costs.fitting(in_flight, space.model.cluster.memory)
    units = behind.shape[1]
    left = np.full_like(behind, math.inf)
    left[:, option.units :] = behind[:, : units - option.units]
    own = settings.num_microbatches * seconds + option.step
    totals = np.maximum(own[:, :, None], seconds[:, :, None] + left[None, :, :])
    stops = totals.argmin(axis=1)
    return np.take_along_axis(totals, stops[:, None, :], axis=1)[:, 0, :], stops


def _chosen(options: list[_Option], choices: list[tuple[Array, Array]], units: int) -> list[_Option]:
    first, chosen = 0, []
    for option_of, stops in reversed(choices):
        option = options[option_of[first, units]]
        first, units = int(stops[first, units]), units - option.units
        chosen.append(option)
    return chosen


def _unit(space: SearchSpace) -> int:
    """The devices that are given out together."""
    devices = space.num_devices
    return next(
        unit for unit in range(1, devices + 1) if devices % unit == 0 and devices // unit <= MOST_UNITS
    )


def _bounds_of_layers(num_layers: int) -> list[int]:
    """Where the layers begin that are put together."""
    if num_layers <= MOST_LAYERS:
        return [*range(num_layers + 1)]
    inner = np.linspace(2, num_layers - 2, MOST_LAYERS - 3).round().astype(int)
    return [0, 1, *(int(bound) for bound in inner), num_layers - 1, num_layers]


def _options(space: SearchSpace, settings: StepSettings, unit: int, bounds: list[int]) -> list[_Option]:
    """For each size the submeshes with the least work, and the one that needs the least memory."""
    by_size: dict[int, list[tuple[float, float, Submesh]]] = {}
    for submesh in space.submeshes:
        size = math.prod(submesh.values())
        if size % unit == 0 and space.profile.rows // settings.num_microbatches % submesh["data"] == 0:
            table = _table(space, settings, submesh)
            work = float(table.until["forward"][-1] + table.until["backward"][-1])
            held = float(table.until["weights"][-1] + table.until["state"][-1] + table.until["gradients"][-1])
            by_size.setdefault(size, []).append((work, held, submesh))
    chosen = []
    for found in by_size.values():
        by_work = sorted(found, key=lambda entry: entry[0])[:OPTIONS_PER_SIZE]
        least = min(found, key=lambda entry: entry[1])
        chosen += [submesh for _, _, submesh in (*by_work, *([] if least in by_work else [least]))]
    return [_option(space, settings, submesh, unit, bounds) for submesh in chosen]


def _option(
    space: SearchSpace, settings: StepSettings, submesh: Submesh, unit: int, bounds: list[int]
) -> _Option:
    model, size = space.model, math.prod(submesh.values())
    table = _table(space, settings, submesh)
    link = message_link(model.cluster, Place(0, submesh), Place(size, submesh))
    hops = np.append(2 * (link.latency + table.layers["entering"] / link.bandwidth), 0.0)
    overhead = (1 + space.profile.has_backward) * model.cluster.task_overhead
    rows = np.ix_(bounds, bounds)
    whole = StageRangeCosts.of(table, overhead, hops)
    range_costs = StageRangeCosts(whole.seconds[rows], whole.held[rows], whole.residuals[rows], hops[bounds])
    until = table.until["step"][bounds]
    return _Option(submesh, size // unit, range_costs, until[None, :] - until[:, None])


def _table(space: SearchSpace, settings: StepSettings, submesh: Submesh):
    group_settings = space.model.group_settings(Place(0, submesh), settings)
    return space.model.table(group_settings)
