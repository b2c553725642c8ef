"""Estimates all ways to run a step, before their layers are cut into stages.

With all layers a group would take ``t`` seconds for a microbatch. If layers are in proportion to speed, all
groups take ``1 / sum(1 / t)``. A group whose memory holds a smaller share of the layers has that share, and
the other groups have more. The closed forms of the schedules then give the time of a step. Arrays have a row
for each family of schedules and a column for each arrangement of groups, so that a million candidates are
estimated in a second.

An arrangement has equal groups in each pool. The groups of a pool follow one another, so that few messages go
between pools; ``uneven.py`` finds groups of different sizes.

References: Guo et al., "Zorse: Optimizing LLM Training Efficiency on Heterogeneous GPU Clusters", 2025,
arXiv:2507.10392. Gao et al., "AdaPtis: Reducing Pipeline Bubbles with Adaptive Pipeline Parallelism on
Heterogeneous Models", 2025, arXiv:2509.23722.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpmd.planner.candidate import Candidate
from mpmd.planner.collectives import DeviceRange, message_link
from mpmd.planner.search.forms import Forms
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.shared_cores import groups_at_once
from mpmd.planner.submesh import Submesh
from mpmd.simulate import Link

Array = np.ndarray
Groups = tuple[Submesh, ...]

MOST_ARRANGEMENTS = 64
"""The most ways to assign groups with given submeshes to several pools."""

MOST_ORDERS = 6
"""The most orders of pools along the pipeline."""

MOST_ESTIMATES = 1_000
"""The most estimates that are returned: more than a search cuts into stages."""

MOST_SHORT = 40
"""The most estimates that do not fit, for each settings."""

MOST_SMALLEST = 16

TINY = 1e-30
"""The seconds or bytes of layers that need none."""


class Estimate(NamedTuple):
    """An uncut candidate with its estimated cost.

    Attributes:
      seconds: seconds of a step; infinite if the layers do not fit.
    """

    candidate: Candidate
    seconds: float


@dataclasses.dataclass(frozen=True)
class Estimates:
    """The best estimates of a search space.

    Attributes:
      fastest: the shortest step first; then estimates that do not fit, the least missing memory first.
      smallest: estimates that need the least memory, whether they fit or not, the smallest first.
    """

    fastest: list[Estimate]
    smallest: list[Estimate]


def estimates(space: SearchSpace) -> Estimates:
    tables = [*_tables(space)]
    fastest = sorted(
        itertools.chain(*(table.fastest() for table in tables)),
        key=lambda cell: (cell.seconds, cell.needed),
    )
    smallest = sorted(itertools.chain(*(table.smallest() for table in tables)), key=lambda cell: cell.needed)
    return Estimates(
        [*itertools.islice(_built(space, fastest), MOST_ESTIMATES)],
        [*itertools.islice(_built(space, smallest), MOST_SMALLEST)],
    )


class _Cell(NamedTuple):
    """An estimate whose schedule is not built yet.

    Attributes:
      needed: the memory that all layers need, over the memory of all groups.
    """

    seconds: float
    needed: float
    family: tuple[str, float]
    groups: Groups
    settings: Candidate


@dataclasses.dataclass(frozen=True)
class _EstimateTable:
    """The estimates for some settings: rows are ``families``, columns are ``arrangements``."""

    settings: Candidate
    families: Sequence[tuple[str, float]]
    arrangements: Sequence[Groups]
    seconds: Array
    needed: Array

    def fastest(self) -> Iterator[_Cell]:
        """Yields the cells with the shortest steps, then the cells that lack the least memory to fit."""
        short = np.where(np.isinf(self.seconds), self.needed, math.inf)
        chosen = *_least(self.seconds, MOST_ESTIMATES), *_least(short, MOST_SHORT)
        return (self._cell(*divmod(int(position), len(self.arrangements))) for position in chosen)

    def smallest(self) -> Iterator[_Cell]:
        rows = self.needed.argmin(axis=0)
        columns = _least(self.needed.min(axis=0), MOST_SMALLEST)
        return (self._cell(int(rows[column]), int(column)) for column in columns)

    def _cell(self, row: int, column: int) -> _Cell:
        return _Cell(
            float(self.seconds[row, column]),
            float(self.needed[row, column]),
            self.families[row],
            self.arrangements[column],
            self.settings,
        )


def _least(values: Array, count: int) -> Array:
    """The positions of the ``count`` least finite values, the least first; the first of equal values."""
    values = values.ravel()
    if len(values) > count:
        limit = np.partition(values, count)[count]
        positions = np.flatnonzero(values <= limit)
    else:
        positions = np.arange(len(values))
    ordered = positions[np.argsort(values[positions], kind="stable")][:count]
    return ordered[np.isfinite(values[ordered])]


def _built(space: SearchSpace, cells: Iterable[_Cell]) -> Iterator[Estimate]:
    """The cells whose schedules exist, with the pools in each order along the pipeline."""
    for cell in cells:
        (family, stages_per_group), groups = cell.family, len(cell.groups)
        schedule = space.schedule(family, round(groups * stages_per_group), groups)
        if schedule is not None:
            for ordered in _orders(space, cell.groups):
                candidate = dataclasses.replace(cell.settings, schedule=schedule, submeshes=ordered)
                yield Estimate(candidate, cell.seconds)


def _orders(space: SearchSpace, groups: Groups) -> Iterator[Groups]:
    if isinstance(space.constraints.submesh, tuple):
        yield groups
        return
    of_pools = [[*of_pool] for _, of_pool in itertools.groupby(groups, lambda submesh: submesh.pool)]
    for ordered in itertools.islice(itertools.permutations(of_pools), MOST_ORDERS):
        yield tuple(itertools.chain(*ordered))


def _arrangements(space: SearchSpace) -> Iterator[Groups]:
    most, asked = len(space.profile.layers), space.constraints.groups
    if isinstance(space.constraints.submesh, tuple):
        fixed = space.fixed_submeshes(len(space.constraints.submesh))
        yield from itertools.islice(fixed, MOST_ARRANGEMENTS)
        return
    for number in range(1, len(space.devices) + 1):
        # In one pool any number of groups may be best. In several pools, all devices are used.
        uses_all = number > 1 and asked is None and space.constraints.submesh is None
        options = {pool: [*_of_pool(space, pool, uses_all)] for pool in space.devices}
        for pools in itertools.combinations(options, number):
            for chosen in itertools.product(*(options[pool] for pool in pools)):
                groups = tuple(itertools.chain(*chosen))
                if len(groups) <= most and asked in (None, len(groups)):
                    yield groups


def _of_pool(space: SearchSpace, pool: str, uses_all: bool) -> Iterator[Groups]:
    """Equal groups of a pool: as many as the pool has devices for if ``uses_all``, or any number up to
    that."""
    for submesh in space.submeshes:
        if submesh.pool == pool:
            most = min(space.devices[pool] // submesh.num_devices, len(space.profile.layers))
            for number in range(most if uses_all else 1, most + 1):
                yield (submesh,) * number


def _tables(space: SearchSpace) -> Iterator[_EstimateTable]:
    arrangements = [*_arrangements(space)]
    forms = {number: Forms.of(space, number) for number in space.numbers_of_microbatches}
    variants: dict[frozenset[Submesh], list[Candidate]] = {}
    columns: dict[Candidate, list[int]] = {}
    for column, groups in enumerate(arrangements):
        distinct = frozenset(groups)
        if distinct not in variants:
            uncut = dataclasses.replace(space.alone(groups[0]), submeshes=tuple(dict.fromkeys(groups)))
            variants[distinct] = [
                dataclasses.replace(variant, submeshes=()) for variant in space.variants(uncut)
            ]
        for settings in variants[distinct]:
            columns.setdefault(settings, []).append(column)
    parts = _ArrangementParts.of(space, arrangements)
    for settings, chosen in columns.items():
        of_number = forms[settings.num_microbatches]
        yield _EstimateTable(
            settings,
            of_number.families,
            [arrangements[column] for column in chosen],
            *_costs(space, of_number, settings, parts.of_columns(chosen)),
        )


@dataclasses.dataclass(frozen=True)
class _ArrangementParts:
    """The parts of arrangements, each of equal groups: arrays by part and arrangement.

    Attributes:
      submeshes: the submeshes to which ``index`` points.
      numbers: the numbers of groups; 0 for arrangements with fewer parts.
      latencies, bandwidths: of the link from the previous part, or within the only part.
    """

    submeshes: list[Submesh]
    index: Array
    numbers: Array
    latencies: Array
    bandwidths: Array

    @staticmethod
    def of(space: SearchSpace, arrangements: Sequence[Groups]) -> _ArrangementParts:
        counts = [collections.Counter(groups) for groups in arrangements]
        submeshes = [*dict.fromkeys(itertools.chain(*counts))]
        positions = {submesh: position for position, submesh in enumerate(submeshes)}
        shape = max(map(len, counts), default=1), len(counts)
        index, numbers = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
        latencies, bandwidths = np.zeros(shape), np.full(shape, math.inf)
        links: dict[tuple[Submesh, Submesh], Link] = {}
        for column, of_column in enumerate(counts):
            previous = [*of_column][-1]
            for part, (submesh, number) in enumerate(of_column.items()):
                index[part, column], numbers[part, column] = positions[submesh], number
                if (previous, submesh) not in links:
                    ranges = DeviceRange(0, previous), DeviceRange(previous.num_devices, submesh)
                    links[previous, submesh] = message_link(space.model.cluster, *ranges)
                link = links[previous, submesh]
                latencies[part, column], bandwidths[part, column] = link.latency, link.bandwidth
                previous = submesh
        return _ArrangementParts(submeshes, index, numbers, latencies, bandwidths)

    def of_columns(self, columns: list[int]) -> _ArrangementParts:
        arrays = (self.index, self.numbers, self.latencies, self.bandwidths)
        return _ArrangementParts(self.submeshes, *(array[:, columns] for array in arrays))


class _Layers(NamedTuple):
    """Costs of all layers of a step on a group; or arrays of costs, by part and arrangement.

    Attributes:
      seconds: seconds of forward and backward of a microbatch.
      step: seconds of a step outside the loop.
      held: bytes of a device for weights, gradients and state, during the whole step.
      residuals: bytes of a device for the residuals of a microbatch.
      temporaries: the least bytes that any layer needs beside these.
      entering: bytes of a message, of the size that layers have on average.
      overhead: seconds that a task takes in addition to its computation.
      memory: bytes of a device.
      devices: number of devices of the group.
    """

    seconds: Array
    step: Array
    held: Array
    residuals: Array
    temporaries: Array
    entering: Array
    overhead: Array
    memory: Array
    devices: Array


def _layers_on(space: SearchSpace, submesh: Submesh, settings: Candidate) -> list[float]:
    """The fields of ``_Layers`` for a group."""
    model = space.model
    table = model.table(model.group_settings(DeviceRange(0, submesh), settings))
    return [
        table.total("forward") + table.total("backward"),
        table.total("step"),
        sum(map(table.total, ("weights", "gradients", "state"))),
        table.total("residuals"),
        float(table.layers["temporaries"].min()),
        float(table.layers["entering"].mean()),
        model.task_overhead(submesh.pool, submesh.num_devices),
        model.cluster.pool(submesh.pool).memory,
        submesh.num_devices,
    ]


def _costs(
    space: SearchSpace, forms: Forms, settings: Candidate, parts: _ArrangementParts
) -> tuple[Array, Array]:
    """The seconds of a step, and the needed memory over the memory of all groups."""
    used = np.unique(parts.index)
    of_submesh = np.zeros((len(parts.submeshes), len(_Layers._fields)))
    of_submesh[used] = [_layers_on(space, parts.submeshes[i], settings) for i in used]
    layers = _Layers(*np.moveaxis(of_submesh[parts.index], -1, 0))
    numbers, cluster = parts.numbers, space.model.cluster
    groups = numbers.sum(axis=0)
    of_groups = forms.of_groups(groups)
    # The closed form has the microbatches in flight of a group with an equal share of the layers.
    of_all_layers = layers.held[:, None] * of_groups.held
    of_all_layers = (
        of_all_layers + layers.residuals[:, None] * groups * of_groups.in_flight * of_groups.residuals
    )
    room = np.maximum(0.0, layers.memory[:, None] - layers.temporaries[:, None] / forms.slices)
    most = room / np.maximum(of_all_layers, TINY)
    with np.errstate(divide="ignore"):
        needed = 1 / (numbers[:, None] * most).sum(axis=0)
    slowest = groups * _slowest(layers.seconds, most, numbers)
    overhead = settings.num_microbatches * of_groups.tasks * layers.overhead.max(axis=0)
    devices = (numbers * layers.devices).sum(axis=0)
    together = np.maximum(1.0, groups / groups_at_once(cluster, devices / groups))
    busy = slowest * np.minimum(of_groups.work, settings.num_microbatches / groups) + overhead
    hop = (parts.latencies + layers.entering / parts.bandwidths).max(axis=0)
    seconds = (
        np.maximum(slowest * of_groups.work * of_groups.seconds + overhead, together * busy)
        + of_groups.hops * hop
        + together * _slowest(layers.step, most, numbers)
    )
    return seconds, np.where(np.isfinite(of_groups.work), needed, math.inf)


def _slowest(seconds: Array, most: Array, numbers: Array) -> Array:
    """The least seconds of the slowest group, for each family and arrangement; infinite if the groups do not
    hold all layers.

    Args:
      seconds: by part and arrangement, the seconds of a group with all layers.
      most: by part, family and arrangement, the share of all layers that a group can have.
      numbers: by part and arrangement, the number of groups.
    """
    seconds = np.broadcast_to(np.maximum(seconds, TINY)[:, None], most.shape)
    counts = np.broadcast_to(numbers[:, None], most.shape)
    # Groups are full in the order of the time that their most layers take.
    order = np.argsort(most * seconds, axis=0)
    ordered = (np.take_along_axis(array, order, axis=0) for array in (most, seconds, counts))
    left, speed = np.ones(most.shape[1:]), (counts / seconds).sum(axis=0)
    slowest = np.full(most.shape[1:], math.inf)
    for limit, of_part, count in zip(*ordered, strict=True):
        holds = np.isinf(slowest) & (limit * of_part * speed >= left * (1 - 1e-12)) & (count > 0)
        slowest = np.where(holds, left / np.where(holds, speed, 1.0), slowest)
        left, speed = left - count * limit, speed - count / of_part
    return slowest
