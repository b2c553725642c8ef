"""Cuts the layers of a candidate into stages, in the ways that promise most."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from mpmd.language.remat import Remat
from mpmd.planner.candidate import Candidate, Row
from mpmd.planner.collectives import device_ranges_of, message_link
from mpmd.planner.pools import AnyCluster
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.orders import stages_in_flight
from mpmd.planner.search.partition import StageRangeCosts, cuts
from mpmd.planner.search.search_space import SearchSpace


def best_cut(space: SearchSpace, candidate: Candidate) -> Row | None:
    """Returns the candidate with the cut of its layers that fits in memory and gives the shortest step.

    A candidate that is cut already stays so. If no cut fits, returns the cut that lacks the least memory.
    """
    evaluations = [evaluate(space.model, cut) for cut in cut_candidates(space, candidate)]
    return best_of(evaluations, space.model.cluster)


def best_of(evaluations: list[Row], cluster: AnyCluster) -> Row | None:
    fitting = [evaluation for evaluation in evaluations if evaluation.missing_bytes(cluster) <= 0]
    if fitting:
        return min(fitting, key=lambda evaluation: evaluation.seconds)
    return min(evaluations, key=lambda evaluation: evaluation.missing_bytes(cluster), default=None)


def cut_candidates(
    space: SearchSpace, candidate: Candidate, policies: Sequence[tuple[Remat, ...]] = ()
) -> Iterator[Candidate]:
    """A candidate with each cut of its layers that is worth simulating.

    Args:
      policies: other policies of rematerialisation that each stage may have; the cuts are those for the
        fastest policy with which each stage fits. The candidate keeps its own.
    """
    for layers in _cuts(space, candidate, policies):
        yield dataclasses.replace(candidate, layers_per_stage=layers)


def _cuts(
    space: SearchSpace, candidate: Candidate, policies: Sequence[tuple[Remat, ...]]
) -> list[tuple[int, ...]]:
    num_stages = candidate.schedule.num_stages
    if fixed := candidate.layers_per_stage or space.constraints.layers_per_stage:
        return [fixed]
    if num_stages == 1:
        return [(len(space.profile.layers),)]
    homes, in_flight = stages_in_flight(candidate.schedule, candidate.num_microbatches)
    range_costs = _range_costs(space, candidate, homes)
    for policy in policies:
        others = _range_costs(space, dataclasses.replace(candidate, remat=policy), homes)
        range_costs = [
            dataclasses.replace(costs, of_other_policies=(*costs.of_other_policies, other))
            for costs, other in zip(range_costs, others, strict=True)
        ]
    share = max(homes.count(group) for group in set(homes))
    pools = [space.model.cluster.pool(candidate.submeshes[home].pool) for home in homes]
    number = candidate.num_passes
    balanced = [*cuts(range_costs, in_flight, number, [pool.memory / share for pool in pools])]
    # The memory of groups with several stages is only known of whole cuts.
    return balanced or [*cuts(range_costs, in_flight, number, [math.inf] * len(homes))]


def _range_costs(space: SearchSpace, candidate: Candidate, homes: tuple[int, ...]) -> list[StageRangeCosts]:
    model, device_ranges = space.model, device_ranges_of(candidate.submeshes)
    range_costs = []
    for stage, home in enumerate(homes):
        before = device_ranges[homes[stage - 1]] if stage else device_ranges[home]
        link = message_link(model.cluster, before, device_ranges[home])
        range_costs.append(
            space.range_costs(model.group_settings(device_ranges[home], candidate, stage), link)
        )
    return range_costs
