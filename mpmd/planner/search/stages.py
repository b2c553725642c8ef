"""The costs of a candidate's stages: the sums of the costs of their layers."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from mpmd.ir.tasks import TaskType
from mpmd.planner.candidate import Candidate
from mpmd.planner.collectives import (
    AxisCosts,
    DeviceRange,
    axis_costs,
    device_ranges_of,
    message_link,
    share_a_node,
)
from mpmd.planner.hardware import Hardware
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.pools import AnyCluster
from mpmd.planner.search.costs import layer_seconds
from mpmd.planner.search.layer_arrays import (
    Array,
    GroupSettings,
    LayerArrays,
    product,
)
from mpmd.planner.search.memory import layer_bytes
from mpmd.planner.shared_cores import groups_at_once, time_alone
from mpmd.planner.submesh import INNERMOST_FIRST
from mpmd.simulate import Link

MODEL = INNERMOST_FIRST.index("model")


@dataclasses.dataclass(frozen=True)
class LayerTable:
    """The costs of layers in a group, by the field names of ``LayerSeconds`` and ``LayerBytes``.

    Seconds hold while no other group computes.

    Attributes:
      layers: the cost of each layer.
      until: the sum over the layers before each layer, and over all.
    """

    layers: Mapping[str, Array]
    until: Mapping[str, Array]

    def total(self, name: str) -> float:
        return float(self.until[name][-1])


class CostModel:
    """The costs of a step's layers on a cluster; they are computed once for each group's settings."""

    def __init__(self, profile: LayerProfile, cluster: AnyCluster):
        self.profile, self.cluster = profile, cluster
        self._arrays = LayerArrays(profile), LayerArrays(profile, sequence_parallel=True)
        self._tables: dict[GroupSettings, LayerTable] = {}
        self._axis_costs: dict[DeviceRange, tuple[AxisCosts, ...]] = {}

    def task_overhead(self, pool: str, devices: int) -> float:
        return time_alone(self.cluster, devices) * self.cluster.pool(pool).task_overhead

    def arrays(self, group_settings: GroupSettings) -> LayerArrays:
        return self._arrays[group_settings.sequence_parallel]

    def table(self, group_settings: GroupSettings) -> LayerTable:
        if group_settings not in self._tables:
            pool = self.cluster.pool(group_settings.pool)
            arrays = self.arrays(group_settings)
            seconds = vars(layer_seconds(arrays, group_settings, pool)).items()
            alone = time_alone(self.cluster, math.prod(group_settings.sizes))
            layers = {name: alone * values for name, values in seconds} | vars(
                layer_bytes(arrays, group_settings)
            )
            until = {name: np.concatenate([[0.0], np.cumsum(values)]) for name, values in layers.items()}
            self._tables[group_settings] = LayerTable(layers, until)
        return self._tables[group_settings]

    def group_settings(
        self, device_range: DeviceRange, candidate: Candidate, stage: int = 0
    ) -> GroupSettings:
        submesh = device_range.submesh
        return GroupSettings(
            submesh.sizes,
            self._costs_along_axes(device_range),
            candidate.num_passes,
            candidate.remat_of(stage),
            candidate.fsdp,
            candidate.gather_once,
            submesh.pool,
            candidate.sequence_parallel,
        )

    def _costs_along_axes(self, device_range: DeviceRange) -> tuple[AxisCosts, ...]:
        if device_range not in self._axis_costs:
            pool = self.cluster.pool(device_range.submesh.pool)
            self._axis_costs[device_range] = axis_costs(pool, device_range)
        return self._axis_costs[device_range]


class Stages:
    """The stages of a candidate.

    Attributes:
      homes: the group of each stage.
      device_ranges: of each group.
      tables: of each stage, on its group and by its policy.
      firsts, stops: the first layer of each stage, and the first of the next.
    """

    def __init__(self, model: CostModel, candidate: Candidate, homes: tuple[int, ...]):
        sizes = candidate.layers_per_stage
        assert len(sizes) == len(homes), f"{sizes} are layers of {len(sizes)} stages, not of {len(homes)}"
        self.model, self.candidate, self.homes = model, candidate, homes
        self.device_ranges = device_ranges_of(candidate.submeshes)
        self.group_settings = [
            model.group_settings(device_range, candidate) for device_range in self.device_ranges
        ]
        self.tables = [
            model.table(model.group_settings(self.device_ranges[home], candidate, stage))
            for stage, home in enumerate(homes)
        ]
        self._of_group = [model.table(group_settings) for group_settings in self.group_settings]
        self.stops = list(accumulate(candidate.layers_per_stage))
        self.firsts = [0, *self.stops[:-1]]

    @functools.cached_property
    def pools(self) -> list[Hardware]:
        return [self.model.cluster.pool(submesh.pool) for submesh in self.candidate.submeshes]

    @property
    def task_overheads(self) -> list[float]:
        submeshes = (self.candidate.submeshes[home] for home in self.homes)
        return [self.model.task_overhead(submesh.pool, submesh.num_devices) for submesh in submeshes]

    @functools.cached_property
    def groups_at_once(self) -> float:
        devices = (device_range.num_devices for device_range in self.device_ranges)
        return float(groups_at_once(self.model.cluster, statistics.fmean(devices)))

    def totals(self, name: str) -> list[float]:
        return [
            float(table.until[name][stop] - table.until[name][first])
            for table, first, stop in zip(self.tables, self.firsts, self.stops, strict=True)
        ]

    def largest(self, name: str) -> list[float]:
        return [
            float(table.layers[name][first:stop].max())
            for table, first, stop in zip(self.tables, self.firsts, self.stops, strict=True)
        ]

    def of_groups(self, numbers: list[float]) -> list[float]:
        """For each group, the sum over its stages."""
        sums = [0.0] * len(self.device_ranges)
        for home, number in zip(self.homes, numbers, strict=True):
            sums[home] += number
        return sums

    def held(self, group: int, layer: int, name: str) -> float:
        """A cost of a layer on a group that no policy of rematerialisation changes, such as ``weights``."""
        return float(self._of_group[group].layers[name][layer])

    def message_bytes(self, stage: int, group: int) -> float:
        """Bytes that pass between ``stage`` and the previous stage for a microbatch, on each device of
        ``group``."""
        first = self.firsts[stage]
        skips = [skip for skip in self._skips if skip[:2] == (stage - 1, stage)]
        past = sum(nbytes * self._share(group, layer) for _, _, layer, nbytes in skips)
        return self.held(group, first, "entering") + past

    def messages(self) -> tuple[dict[TaskType, float], dict[tuple[int, int], Link]]:
        """By sending task, the seconds for which its messages occupy a link; and links of a byte a second."""
        seconds: dict[TaskType, float] = {}
        links: dict[tuple[int, int], Link] = {}
        for stage in range(1, len(self.homes)):
            before, after = self.homes[stage - 1], self.homes[stage]
            for sender, reader, task in ((before, after, stage - 1), (after, before, stage)):
                link = message_link(
                    self.model.cluster, self.device_ranges[sender], self.device_ranges[reader]
                )
                nbytes = self.message_bytes(stage, reader) * self._copies(stage, sender, reader)
                time = nbytes / link.bandwidth
                kinds = ("fwd",) if task < stage else ("bwd", "bwdA")
                seconds |= {(kind, task): time for kind in kinds}  # type: ignore[misc]
                links[sender, reader] = Link(link.latency, bandwidth=1.0)
        return seconds, links

    def _copies(self, stage: int, sender: int, reader: int) -> float:
        """The bytes of a message on a link, divided by the bytes that a device receives.

        Within a node each device receives its part over a link of its own. Between nodes the devices along
        ``model`` share a link, on which a value that is not divided counts once.
        """
        if share_a_node(self.model.cluster, self.device_ranges[sender], self.device_ranges[reader]):
            return 1.0
        group_settings = self.group_settings[reader]
        shares = self.model.arrays(group_settings).shares("received", group_settings.sizes)
        along_model = shares[MODEL]
        return 1 / float(along_model[self.firsts[stage]])

    def skipped_bytes(self) -> list[float]:
        """For each group, the bytes of waiting values that go past layers, on each device."""
        waiting = [0.0] * len(self.device_ranges)
        for source, target, layer, nbytes in self._skips:
            group = self.homes[target]
            waiting[group] += (target - source + 1) * nbytes * self._share(group, layer)
        return waiting

    @functools.cached_property
    def stage_of(self) -> list[int]:
        return [stage for stage, size in enumerate(self.candidate.layers_per_stage) for _ in range(size)]

    @functools.cached_property
    def _skips(self) -> list[tuple[int, int, int, int]]:
        """Values that go past stages: source and target stage, target layer, bytes of a microbatch."""
        skips = self.model.profile.skips
        stages = [(self.stage_of[a], self.stage_of[b], b, nbytes) for a, b, nbytes in skips]
        return [skip for skip in stages if skip[0] != skip[1]]

    def _share(self, group: int, layer: int) -> float:
        """The share of a value between layers that a device of a group receives."""
        group_settings = self.group_settings[group]
        arrays = self.model.arrays(group_settings)
        share = product(arrays.shares("received", group_settings.sizes))
        return float(share[layer]) * arrays.rows(group_settings)
