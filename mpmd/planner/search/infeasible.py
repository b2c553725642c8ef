"""The message for a step that fits nowhere: the missing memory, and the nearest changes that would fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mpmd.planner.choice_table import candidate_text
from mpmd.planner.constraints import Constraints
from mpmd.planner.hardware import Hardware
from mpmd.planner.search.candidates import best_cut
from mpmd.planner.search.estimates import estimates
from mpmd.planner.search.formula import PricedCandidate
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.stages import CostModel
from mpmd.util.tables import human_bytes

MOST_CANDIDATES = 8
"""The most candidates that are evaluated for each change."""

MOST_NODES = 4096


def infeasible(space: SearchSpace) -> str:
    """The message for a search space in which no candidate fits."""
    cluster = space.model.cluster
    evaluations = [e for estimate in estimates(space).smallest if (e := best_cut(space, estimate.candidate))]
    if not evaluations:
        return (
            f"there is no way to run the step as fixed on {space.num_devices} devices: no schedule has "
            f"these numbers of stages and groups, with devices that divide {space.profile.rows} rows"
        )
    least = min(evaluations, key=lambda evaluation: evaluation.missing_bytes(cluster))
    needed, missing = least.prediction.memory.total, least.missing_bytes(cluster)
    changes = " or ".join(_nearest(space))
    remedies = f"it would fit with {changes}" if changes else f"nor does it on {MOST_NODES} such nodes"
    return (
        f"the step does not fit: a device needs at least {human_bytes(needed)} "
        f"({candidate_text(least.candidate)}), and has {human_bytes(needed - missing)}; {remedies}"
    )


def _nearest(space: SearchSpace) -> Iterator[str]:
    """Changes of one constraint, or of the number of nodes, with which a candidate fits."""
    constraints, are_stages = space.constraints, space.profile.are_stages
    has_layers = constraints.layers_per_stage is not None
    fixed = {"layers_per_stage"} if are_stages else set[str]()
    fixed |= {"num_stages"} if are_stages or has_layers else set()  # layers say the number of stages
    fixed |= {"num_microbatches"} if space.profile.num_microbatches else set()
    for field in dataclasses.fields(Constraints):
        value = getattr(constraints, field.name)
        if value is None or field.name in fixed:
            continue
        changes = {field.name: None}
        if not are_stages and field.name in ("layers_per_stage", *["schedule"] * (not has_layers)):
            changes["num_stages"] = None  # they can hardly change while the number of stages stays
        if _first_that_fits(SearchSpace(space.model, dataclasses.replace(constraints, **changes))):
            yield f"another {field.name} than {value}"
    larger = space.model.cluster.with_nodes(2)
    while sum(pool.nodes for pool in larger.pools) <= MOST_NODES:
        if fitting := _first_that_fits(SearchSpace(CostModel(space.profile, larger), constraints)):
            nodes = " and ".join(map(_nodes_text, larger.pools))
            yield f"{nodes} ({candidate_text(fitting.candidate)})"
            return
        larger = larger.with_nodes(2)


def _nodes_text(pool: Hardware) -> str:
    devices = "one device" if pool.devices_per_node == 1 else f"{pool.devices_per_node} devices"
    return f"{pool.nodes} nodes of {devices}"


def _first_that_fits(space: SearchSpace) -> PricedCandidate | None:
    found = estimates(space)
    for estimate in found.fastest[:MOST_CANDIDATES] + found.smallest[:MOST_CANDIDATES]:
        evaluation = best_cut(space, estimate.candidate)
        if evaluation and evaluation.missing_bytes(space.model.cluster) <= 0:
            return evaluation
    return None
