"""Finds groups of different sizes, by the dynamic programme of ``partition.py`` with several options for each
stage.

As Alpa's (arXiv:2201.12023, section 5.2) it gives each stage a run of layers and a submesh. A stage holds as
many microbatches as in 1F1B, which follows from the stages behind it; other schedules get the same submeshes,
and their own cuts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mpmd.language.remat import Remat
from mpmd.planner.candidate import Candidate
from mpmd.planner.collectives import DeviceRange, message_link
from mpmd.planner.search.layer_arrays import Array
from mpmd.planner.search.partition import GroupOption, StageRangeCosts, programme
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.submesh import Submesh

MOST_LAYERS = 40
"""Number of layers to which a model with more layers is merged; the first and the last layer stay separate.
"""

MOST_UNITS = 32

MOST_STAGES = 32
OPTIONS_PER_SIZE = 2
MOST_RESULTS = 8


@dataclasses.dataclass(frozen=True)
class _SubmeshOption:
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


def uneven_submeshes(
    space: SearchSpace, candidate: Candidate, policies: Sequence[tuple[Remat, ...]]
) -> list[tuple[float, tuple[Submesh, ...]]]:
    """The most promising submeshes of groups of different sizes, for different numbers of groups; each with
    the seconds that a step takes at least, the shortest step first.

    Args:
      candidate: with the settings of all groups, and with the pool in which they are.
      policies: other policies of rematerialisation that each stage may have.
    """
    pool = space.model.cluster.pool(candidate.submeshes[0].pool)
    bounds = _bounds_of_layers(len(space.profile.layers))
    unit = _unit(pool.num_devices)
    options = [
        _option(space, candidate, submesh, unit, bounds, policies)
        for submesh in _submeshes(space, candidate, unit)
    ]
    if len({option.units for option in options}) < 2:
        return []
    units, asked = pool.num_devices // unit, space.constraints.groups
    most = min(len(bounds) - 1, units, MOST_STAGES) if asked is None else asked
    stages = (_of_stage(space, candidate, options, number) for number in range(1, most + 1))
    found = []
    for number, partition in enumerate(programme(stages, units), start=1):
        if partition is not None and asked in (None, number):
            submeshes = tuple(options[option].submesh for option, _ in partition.stages)
            if len({*submeshes}) > 1:
                found.append((partition.seconds, submeshes))
    return sorted(found, key=lambda pair: pair[0])[:MOST_RESULTS]


def _of_stage(
    space: SearchSpace, candidate: Candidate, options: list[_SubmeshOption], number: int
) -> list[GroupOption]:
    """The options of a stage with ``number - 1`` stages behind it."""
    in_flight = min(number, candidate.num_microbatches)
    of_stage = []
    for option in options:
        memory = space.model.cluster.pool(option.submesh.pool).memory
        seconds = option.range_costs.fitting(in_flight, memory)
        busy = candidate.num_microbatches * seconds + option.step
        of_stage.append(GroupOption(seconds, busy, option.range_costs.hops, option.units))
    return of_stage


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


def _submeshes(space: SearchSpace, candidate: Candidate, unit: int) -> list[Submesh]:
    """For each number of devices, the submeshes with the least work and the submesh with the least memory."""
    by_size: dict[int, list[tuple[float, float, Submesh]]] = {}
    pool, number = candidate.submeshes[0].pool, candidate.num_microbatches
    for submesh in space.submeshes:
        size = submesh.num_devices
        if (
            submesh.pool == pool
            and size % unit == 0
            and space.divides((submesh,), number)
            and (not candidate.sequence_parallel or space.divides_between_regions(submesh, number))
        ):
            table = space.model.table(space.model.group_settings(DeviceRange(0, submesh), candidate))
            work = table.total("forward") + table.total("backward")
            held = table.total("weights") + table.total("state") + table.total("gradients")
            by_size.setdefault(size, []).append((work, held, submesh))
    chosen = []
    for submeshes in by_size.values():
        by_work = sorted(submeshes, key=lambda entry: entry[0])[:OPTIONS_PER_SIZE]
        least = min(submeshes, key=lambda entry: entry[1])
        chosen += [submesh for _, _, submesh in (*by_work, *([] if least in by_work else [least]))]
    return chosen


def _option(
    space: SearchSpace,
    candidate: Candidate,
    submesh: Submesh,
    unit: int,
    bounds: list[int],
    policies: Sequence[tuple[Remat, ...]],
) -> _SubmeshOption:
    device_range = DeviceRange(0, submesh)
    link = message_link(space.model.cluster, device_range, DeviceRange(submesh.num_devices, submesh))

    def costs_of(remat: tuple[Remat, ...]) -> StageRangeCosts:
        settings = space.model.group_settings(device_range, dataclasses.replace(candidate, remat=remat))
        return space.range_costs(settings, link).merged(bounds)

    others = tuple(costs_of(policy) for policy in policies)
    range_costs = dataclasses.replace(costs_of(candidate.remat), of_other_policies=others)
    table = space.model.table(space.model.group_settings(device_range, candidate))
    until = table.until["step"][bounds]
    return _SubmeshOption(submesh, submesh.num_devices // unit, range_costs, until[None, :] - until[:, None])
