"""The table of the costs of each run of consecutive layers as a stage, on each submesh."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

from mpmd.planner.candidate import Candidate
from mpmd.planner.choice_table import seconds_text
from mpmd.planner.collectives import INNERMOST_FIRST, DeviceRange, Submesh
from mpmd.planner.constraints import Constraints
from mpmd.planner.hardware import Hardware
from mpmd.planner.layer_profile import Kind, LayerProfile
from mpmd.planner.search.layer_arrays import StepSettings
from mpmd.planner.search.orders import stages_in_flight
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.stages import CostModel
from mpmd.planner.shared_cores import time_alone
from mpmd.util.tables import table


@dataclasses.dataclass(frozen=True)
class StageCost:
    """A run of layers on a submesh.

    Attributes:
      layers: the first one and the last one.
      mesh: the number of nodes, and of devices on each.
      submesh: the number of devices along each axis.
      forward, backward: seconds for a microbatch, while no other group computes on the same nodes.
      stages: the stages of the chosen candidate that have these layers and devices; empty for most rows.
    """

    layers: tuple[int, int]
    mesh: tuple[int, int]
    submesh: Mapping[Kind, int]
    forward: float
    backward: float
    stages: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class StageProfile:
    """Every run of layers on every submesh that groups may have; ``print`` shows it as a table.

    The times are those of the formulas that rank candidates.

    Attributes:
      rows: by layers, then by submesh.
      rows_of_microbatch: the rows of the batch that the times are for.
    """

    rows: tuple[StageCost, ...]
    rows_of_microbatch: int

    @property
    def chosen(self) -> tuple[StageCost, ...]:
        """The row of each stage of the chosen candidate, in order."""
        stages = {stage: row for row in self.rows for stage in row.stages}
        return tuple(row for _, row in sorted(stages.items()))

    def __str__(self) -> str:
        header = ("layers", "mesh", *reversed(INNERMOST_FIRST), "forward", "backward", "chosen")
        return f"stages for microbatches of {self.rows_of_microbatch} rows, by the formulas\n\n" + table(
            header, [_cells(row) for row in self.rows]
        )


def _cells(row: StageCost) -> list[str]:
    first, last = row.layers
    sizes = (str(row.submesh.get(kind, 1)) for kind in reversed(INNERMOST_FIRST))
    return [
        f"{first}" if first == last else f"{first}..{last}",
        "x".join(map(str, row.mesh)),
        *sizes,
        seconds_text(row.forward),
        seconds_text(row.backward),
        ", ".join(f"stage {stage}" for stage in row.stages),
    ]


def stage_profile(profile: LayerProfile, cluster: Hardware, candidate: Candidate) -> StageProfile:
    """The table for a loop of a step, with the microbatches, remat and FSDP of a candidate."""
    rows = profile.rows // candidate.num_microbatches
    return StageProfile(tuple(_rows(profile, cluster, candidate)), rows)


def _rows(profile: LayerProfile, cluster: Hardware, candidate: Candidate) -> Iterator[StageCost]:
    model = CostModel(profile, cluster)
    space, settings, alone = (
        SearchSpace(model, Constraints()),
        StepSettings.of(candidate),
        time_alone(cluster),
    )
    submeshes = [*candidate.submeshes]
    submeshes += [
        submesh for submesh in space.submeshes if space.divides((submesh,), settings.num_microbatches)
    ]
    all_sizes = sorted({*map(_sizes, submeshes)}, key=lambda sizes: (math.prod(sizes), sizes))
    chosen = _stages_of(candidate)
    for first in range(len(profile.layers)):
        for stop in range(first + 1, len(profile.layers) + 1):
            for sizes in all_sizes:
                submesh = dict(zip(INNERMOST_FIRST, sizes, strict=True))
                until = model.table(model.group_settings(DeviceRange(0, submesh), settings)).until
                forward, backward = (
                    alone * float(until[name][stop] - until[name][first]) for name in ("forward", "backward")
                )
                nodes = -(-math.prod(sizes) // cluster.devices_per_node)
                yield StageCost(
                    layers=(first, stop - 1),
                    mesh=(nodes, math.prod(sizes) // nodes),
                    submesh=submesh,
                    forward=forward,
                    backward=backward,
                    stages=tuple(chosen.get((first, stop, sizes), ())),
                )


def _sizes(submesh: Submesh) -> tuple[int, ...]:
    return tuple(submesh.get(kind, 1) for kind in INNERMOST_FIRST)


def _stages_of(candidate: Candidate) -> dict[tuple[int, int, tuple[int, ...]], list[int]]:
    """Stages by their first layer, the first layer behind them, and the sizes of their group's axes."""
    homes, _ = stages_in_flight(candidate.schedule, candidate.num_microbatches)
    stops = [*itertools.accumulate(candidate.layers_per_stage)]
    stages: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for stage, (stop, home) in enumerate(zip(stops, homes, strict=True)):
        sizes = _sizes(candidate.submeshes[home])
        stages.setdefault((stop - candidate.layers_per_stage[stage], stop, sizes), []).append(stage)
    return stages
