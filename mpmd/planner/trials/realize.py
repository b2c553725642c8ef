"""Makes the actual plan of a candidate, and predicts its cost from the plan."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mpmd.compiler.find_layers.auto_marks import auto_marks
from mpmd.compiler.request import SequenceParallel
from mpmd.ir.plan import Plan
from mpmd.language.decisions import Decisions, in_order
from mpmd.planner.candidate import Candidate, Prediction
from mpmd.planner.collectives import DeviceRange, device_ranges_of
from mpmd.planner.hardware import Hardware
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.pools import AnyCluster
from mpmd.planner.shared_cores import (
    groups_at_once,
    time_alone,
)
from mpmd.planner.trials.loop_weights import weights_before_loops
from mpmd.planner.trials.measure import costs_of, measure_tasks
from mpmd.planner.trials.planned_costs import edge_links, longest_all_reduces, message_bytes, task_seconds
from mpmd.planner.trials.predict import predict
from mpmd.planner.trials.predicted_plan import predicted_plan
from mpmd.planner.trials.shardings import AXES
from mpmd.simulate import Costs, MessageBytes, Simulation, simulate
from mpmd.step.lowered_step import LoweredStep


@dataclasses.dataclass(frozen=True)
class Realized:
    """A candidate's plan, complete with predicted or compiled shardings and memory, and its costs in seconds.

    Attributes:
      message_bytes: the bytes of its messages on the links of ``costs``.
    """

    step: LoweredStep
    plan: Plan
    costs: Costs
    prediction: Prediction
    message_bytes: MessageBytes

    @functools.cached_property
    def size(self) -> int:
        return sum(len(program.instructions) for program in self.plan.programs)

    def simulation(self) -> Simulation:
        return simulate(self.plan, self.costs, topology=self.message_bytes)


def decisions_of(candidate: Candidate, profiles: Sequence[LayerProfile]) -> Decisions:
    of_loops, number = {}, None
    for loop, profile in zip(candidate.loops, profiles, strict=True):
        if profile.decision_index is None:
            return Decisions()
        # A step that itself says where stages end is left as it is.
        layers = None if profile.are_stages else loop.layers_per_stage
        of_loops[profile.decision_index] = Decisions(
            loop.schedule, layers_per_stage=layers, remat=loop.remat, mark_layers=auto_marks
        )
        if profile.num_microbatches is None:
            number = loop.num_microbatches
    return Decisions(num_microbatches=number, of_loops=in_order(of_loops))


def options_of(candidate: Candidate) -> dict[str, Any]:
    """The keywords of ``mpmd.jit`` by which weights are gathered and gradients summed once per step."""
    return {"gather": "step", "partial_sums": "all"} if candidate.gather_once else {}


def sequence_parallel_of(candidate: Candidate, profiles: Sequence[LayerProfile]) -> SequenceParallel | None:
    """The sharding of values between tensor-parallel regions under a candidate.

    Args:
      profiles: of the step's loops, which have the same specs.
    """
    specs, between = profiles[0].specs, profiles[0].between
    if not candidate.sequence_parallel or between is None:
        return None
    rows = {} if between == "data" else specs.get("data", {})
    return SequenceParallel(tokens=specs.get(between, {}), rows=rows, outer_axis=between)


def submeshes_of(candidate: Candidate) -> list[dict[str, int]]:
    return [{axis: submesh[axis] for axis in AXES} for submesh in candidate.submeshes]


def simulated(step: LoweredStep, candidate: Candidate, cluster: AnyCluster) -> Realized:
    device_ranges = device_ranges_of(candidate.submeshes)
    predicted = predicted_plan(step.compiled.program, cluster.flash_attention)
    seconds = task_seconds(predicted, cluster, device_ranges)
    reducing = longest_all_reduces(predicted, seconds, cluster, device_ranges)
    return _realized(step, predicted.plan, seconds, cluster, device_ranges, "simulation", reducing)


def measured(before: Realized, candidate: Candidate, cluster: Hardware) -> Realized:
    """Predicts the same plan from tasks measured on this process's devices, each group by itself."""
    device_ranges = device_ranges_of(candidate.submeshes)
    tasks = measure_tasks(before.step)
    alone = [time_alone(cluster, device_range.num_devices) for device_range in device_ranges]
    seconds = {
        (group, name): time + alone[group] * cluster.task_overhead
        for (group, name), time in tasks.seconds.items()
    }
    realized = _realized(before.step, tasks.plan, seconds, cluster, device_ranges, "measurement", 0.0)
    # The all-reduces are in the measured times, of which they are taken to have the same share.
    share = before.prediction.communication
    return dataclasses.replace(
        realized, prediction=dataclasses.replace(realized.prediction, communication=share)
    )


def _realized(
    step: LoweredStep,
    plan: Plan,
    alone: Mapping[tuple[int, str], float],
    cluster: AnyCluster,
    device_ranges: Sequence[DeviceRange],
    source: str,
    reducing: float,
) -> Realized:
    """A plan with its costs.

    Args:
      alone: the seconds of each executable on each group while no other group computes.
      source: where they come from.
      reducing: the seconds of a step that go into all-reduces and gathered weights.
    """
    devices = statistics.fmean(device_range.num_devices for device_range in device_ranges)
    costs = dataclasses.replace(
        costs_of(plan, alone),
        links=edge_links(cluster, device_ranges),
        at_once=float(groups_at_once(cluster, devices)),
    )
    sent = message_bytes(plan, cluster, device_ranges)
    compiled = step.compiled
    fed_back = {argument for argument, _ in compiled.step.fed_back}
    updated = {leaf.name for i, leaf in enumerate(plan.inputs) if i in fed_back and leaf.name}
    prediction = predict(
        plan,
        sent,
        compiled.verified.arrivals,
        updated,
        costs,
        source,
        reducing,
        holding=cluster.holding,
        computed_weights=weights_before_loops(compiled.program, updated),
        capacities=[cluster.pool(device_range.submesh.pool).memory for device_range in device_ranges],
    )
    return Realized(step, plan, costs, prediction, sent)
