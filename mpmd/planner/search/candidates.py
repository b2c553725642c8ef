"""Candidates of a shape: its layers are cut into stages in the ways that promise most."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from mpmd.planner.candidate import Candidate
from mpmd.planner.collectives import message_link, places_of
from mpmd.planner.search.even_groups import even_groups
from mpmd.planner.search.formula import Evaluation, evaluate
from mpmd.planner.search.layer_arrays import Array
from mpmd.planner.search.orders import stages_in_flight
from mpmd.planner.search.partition import StageRangeCosts, cuts
from mpmd.planner.search.sweep import SearchSpace, Shape


def best_of_shape(space: SearchSpace, shape: Shape) -> Evaluation | None:
    """The shortest step of a shape that fits, or that which needs least memory if none does."""
    found = [evaluate(space.model, candidate) for candidate in candidates(space, shape)]
    return best_of(found, space.model.cluster.memory)


def best_of(found: list[Evaluation], memory: float) -> Evaluation | None:
    """The shortest step that fits, or that which needs least memory if none does."""
    fitting = [evaluation for evaluation in found if evaluation.prediction.memory.total <= memory]
    if fitting:
        return min(fitting, key=lambda evaluation: evaluation.seconds)
    return min(found, key=lambda evaluation: evaluation.prediction.memory.total, default=None)


def candidates(space: SearchSpace, shape: Shape) -> Iterator[Candidate]:
    """A shape with each cut that is worth simulating."""
    for layers in _cuts(space, shape):
        yield Candidate(layers, shape.submeshes, shape.schedule, *dataclasses.astuple(shape.settings))


def _cuts(space: SearchSpace, shape: Shape) -> list[tuple[int, ...]]:
    num_stages = shape.schedule.num_stages
    if space.constraints.layers_per_stage is not None:
        return [space.constraints.layers_per_stage]
    if num_stages == 1:
        return [(len(space.profile.layers),)]
    homes, in_flight = stages_in_flight(shape.schedule, shape.settings.num_microbatches)
    range_costs = _stretches(space, shape, homes)
    share = max(homes.count(group) for group in set(homes))
    memory = space.model.cluster.memory / share
    found = [*cuts(range_costs, in_flight, shape.settings.num_microbatches, memory)]
    # The memory of groups with several stages is only known of whole cuts.
    found = found or [*cuts(range_costs, in_flight, shape.settings.num_microbatches, math.inf)]
    return [*dict.fromkeys([*found, *(even_groups(range_costs, homes, cut) for cut in found)])]


def _stretches(space: SearchSpace, shape: Shape, homes: tuple[int, ...]) -> list[StageRangeCosts]:
    """Of the settings of the groups of the stages."""
    model, places = space.model, places_of(shape.submeshes)
    overhead = (1 + space.profile.has_backward) * model.cluster.task_overhead
    made: dict[object, StageRangeCosts] = {}
    range_costs = []
    for stage, home in enumerate(homes):
        group_settings = model.group_settings(places[home], shape.settings)
        before = places[homes[stage - 1]] if stage else places[home]
        link = message_link(model.cluster, before, places[home])
        if (group_settings, link) not in made:
            table = model.table(group_settings)
            made[group_settings, link] = StageRangeCosts.of(
                table, overhead, _hops(table.layers["entering"], link)
            )
        range_costs.append(made[group_settings, link])
    return range_costs


def _hops(entering: Array, link) -> Array:
    return np.append(2 * (link.latency + entering / link.bandwidth), 0.0)
