"""The table of the costs of each run of consecutive layers as a stage, on each submesh."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from mpmd.planner.candidate import Candidate
from mpmd.planner.choice_table import seconds_text
from mpmd.planner.collectives import DeviceRange
from mpmd.planner.constraints import Constraints
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.pools import AnyCluster
from mpmd.planner.search.orders import stages_in_flight
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.stages import CostModel
from mpmd.planner.submesh import INNERMOST_FIRST, Submesh
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
    submesh: Submesh
    forward: float
    backward: float
    stages: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class StageProfile:
    """Every run of layers on every submesh that groups may have; ``print`` shows it as a table.

    The times come from the formulas that rank candidates.

    Attributes:
      rows: the costs of stages, by layers and then by submesh.
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
        rows = [_cells(row) for row in self.rows]
        shown = [name for name in rows[0] if any(row[name] for row in rows)]
        return f"stages for microbatches of {self.rows_of_microbatch} rows, by the formulas\n\n" + table(
            shown, [[row[name] for name in shown] for row in rows]
        )


def _cells(row: StageCost) -> dict[str, str]:
    first, last = row.layers
    return {
        "layers": f"{first}" if first == last else f"{first}..{last}",
        "pool": row.submesh.pool,
        "mesh": "x".join(map(str, row.mesh)),
        **{kind: str(row.submesh[kind]) for kind in reversed(INNERMOST_FIRST)},
        "forward": seconds_text(row.forward),
        "backward": seconds_text(row.backward),
        "chosen": ", ".join(f"stage {stage}" for stage in row.stages),
    }


def stage_profile(profile: LayerProfile, cluster: AnyCluster, candidate: Candidate) -> StageProfile:
    """The table for a loop of a step, with the microbatches, remat and FSDP of a candidate."""
    rows = profile.rows // candidate.num_microbatches
    return StageProfile(tuple(_rows(profile, cluster, candidate)), rows)


def _rows(profile: LayerProfile, cluster: AnyCluster, candidate: Candidate) -> Iterator[StageCost]:
    model = CostModel(profile, cluster)
    space, slices = SearchSpace(model, Constraints()), candidate.schedule.slices
    submeshes = [*candidate.submeshes]
    submeshes += [
        submesh for submesh in space.submeshes if space.divides((submesh,), candidate.num_microbatches)
    ]
    ordered = sorted({*submeshes}, key=lambda submesh: (submesh.num_devices, submesh.sizes, submesh.pool))
    chosen = _stages_of(candidate)
    for first in range(len(profile.layers)):
        for stop in range(first + 1, len(profile.layers) + 1):
            for submesh in ordered:
                until = model.table(model.group_settings(DeviceRange(0, submesh), candidate)).until
                forward, backward = (
                    slices * float(until[name][stop] - until[name][first]) for name in ("forward", "backward")
                )
                nodes = -(-submesh.num_devices // cluster.pool(submesh.pool).devices_per_node)
                yield StageCost(
                    layers=(first, stop - 1),
                    mesh=(nodes, submesh.num_devices // nodes),
                    submesh=submesh,
                    forward=forward,
                    backward=backward,
                    stages=tuple(chosen.get((first, stop, submesh), ())),
                )


def _stages_of(candidate: Candidate) -> dict[tuple[int, int, Submesh], list[int]]:
    """Stages by their first layer, the first layer behind them, and their group's submesh."""
    homes, _ = stages_in_flight(candidate.schedule, candidate.num_microbatches)
    stops = [*itertools.accumulate(candidate.layers_per_stage)]
    stages: dict[tuple[int, int, Submesh], list[int]] = {}
    for stage, (stop, home) in enumerate(zip(stops, homes, strict=True)):
        first = stop - candidate.layers_per_stage[stage]
        stages.setdefault((first, stop, candidate.submeshes[home]), []).append(stage)
    return stages
