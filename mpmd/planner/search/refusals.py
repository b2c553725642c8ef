"""Refuses constraints that conflict with one another, the step or the cluster; and steps for which the memory
is too small, with the nearest changes that would fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from mpmd.language.remat import Remat
from mpmd.planner.candidate import Row
from mpmd.planner.choice_table import candidate_text
from mpmd.planner.constraints import Constraints
from mpmd.planner.hardware import Hardware
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.pools import AnyCluster
from mpmd.planner.search.candidates import best_cut
from mpmd.planner.search.estimates import estimates
from mpmd.planner.search.families import build
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.stages import CostModel
from mpmd.planner.submesh import Submesh
from mpmd.schedules import CustomSchedule, Schedule, Seq1F1B
from mpmd.util.tables import first_few, human_bytes
from mpmd.validation import MOST_DEVICES


def combined(constraints: Constraints, profile: LayerProfile) -> Constraints:
    """The constraints with all that follows from them and from the step."""
    layers = constraints.layers_per_stage
    if layers is None and profile.are_stages:
        layers = (1,) * len(profile.layers)
    schedule = constraints.schedule if isinstance(constraints.schedule, Schedule) else None
    stages = len(layers) if layers else schedule.num_stages if schedule else None
    if stages is None and constraints.remat is not None and len(constraints.remat) > 1:
        stages = len(constraints.remat)
    submeshes = len(constraints.submesh) if isinstance(constraints.submesh, tuple) else None
    return dataclasses.replace(
        constraints,
        layers_per_stage=layers,
        num_stages=constraints.num_stages or stages,
        groups=constraints.groups or (schedule.mpmd_dim if schedule else submeshes),
        num_microbatches=(
            constraints.num_microbatches or profile.num_microbatches or _num_microbatches(schedule)
        ),
    )


def _num_microbatches(schedule: Schedule | None) -> int | None:
    return schedule.num_microbatches if isinstance(schedule, CustomSchedule) else None


def contradictions(constraints: Constraints, profile: LayerProfile, cluster: AnyCluster) -> Iterator[str]:
    """All conflicts, each with the numbers. ``constraints`` are as ``combined`` returns them."""
    yield from _of_stages(constraints, profile)
    yield from _of_groups(constraints, profile, cluster)
    yield from _of_schedule(constraints, profile, cluster.num_devices)
    yield from _of_microbatches(constraints, profile)
    yield from _of_submeshes(constraints, profile, cluster)
    yield from _of_sequence_parallel(constraints, profile, cluster)


def _of_stages(constraints: Constraints, profile: LayerProfile) -> Iterator[str]:
    layers, stages, number = constraints.layers_per_stage, constraints.num_stages, constraints.num_layers
    count = len(profile.layers)
    has, marks = f"the step has {count} {_names_text(profile)}", f"the step's marks make {count} stages"
    policies = constraints.remat or (Remat.NONE,)
    if number is not None and profile.decision_index is None:
        yield f"a step without a loop is one layer, and num_layers={number} was asked for"
        number = None
    if profile.are_stages:
        if layers not in (None, (1,) * count):
            yield f"{marks}, which layers_per_stage={layers} cannot cut anew"
        if number is not None:
            yield f"{marks}; num_layers={number} is for one without"
        if stages not in (None, count):
            yield f"{marks}, and num_stages={stages} was asked for"
        if policies != (Remat.NONE,):
            asked = "True" if policies == (Remat.NOTHING_SAVEABLE,) else ", ".join(policies)
            yield (
                f"remat={asked} has layers that are found computed again; this step says its stages itself: "
                "put jax.checkpoint around its own layers"
            )
    else:
        if layers is not None and sum(layers) != count:
            yield f"layers_per_stage={layers} has {sum(layers)} layers; {has}"
        if number not in (None, count):
            yield f"num_layers={number} was asked for; {has}"
        if layers is not None and stages not in (None, len(layers)):
            makes = f"layers_per_stage={layers} makes {len(layers)} stages"
            yield f"{makes}, and num_stages={stages} was asked for"
        elif stages is not None and stages > count:
            yield f"num_stages={stages} needs as many layers; {has}"
    if len(policies) > 1 and stages not in (None, len(policies)):
        yield f"remat has the policies of {len(policies)} stages, and there are to be {stages}"


def _names_text(profile: LayerProfile) -> str:
    names = (f"layer {number}: {layer.name}" for number, layer in enumerate(profile.layers))
    return f"({first_few(names, 5)})"


def _of_groups(constraints: Constraints, profile: LayerProfile, cluster: AnyCluster) -> Iterator[str]:
    groups, devices, stages = constraints.groups or 1, cluster.num_devices, constraints.num_stages
    if groups > devices:
        yield f"groups={groups} need a device each; the cluster has {devices}"
    if groups > (stages or len(profile.layers)):
        has = f"{stages} stages" if stages else f"{len(profile.layers)} layers {_names_text(profile)}"
        yield f"groups={groups} need a stage each; the step has {has}"


def _of_schedule(constraints: Constraints, profile: LayerProfile, devices: int) -> Iterator[str]:
    schedule = constraints.schedule
    if schedule is None:
        return
    name = schedule if isinstance(schedule, str) else schedule.name
    if profile.has_backward and name == "ForwardOnly":
        yield f"the step has backwards; {name} is for steps that have none"
    if not profile.has_backward and name != "ForwardOnly":
        yield f"the step has no backwards; {name} is for steps that do"
    slices = schedule.slices if isinstance(schedule, Schedule) else 1
    if profile.slices == 1 and (slices > 1 or schedule == Seq1F1B.__name__):
        yield (
            f"{schedule} is for a loss that is a loop over slices of its sequences, as mpmd.slices cuts "
            "them, with the marks of all stages in each; docs/long_sequences.md shows one"
        )
    elif slices not in (1, profile.slices):
        yield f"{schedule} has {slices} slices, and the step's loss is a loop over {profile.slices}"
    if isinstance(schedule, str):
        yield from _of_family(schedule, constraints, profile, devices)
        return
    for what, size, fixed in (
        ("stages", schedule.num_stages, constraints.num_stages),
        ("groups", schedule.mpmd_dim, constraints.groups),
        ("microbatches", _num_microbatches(schedule), constraints.num_microbatches),
    ):
        if None not in (fixed, size) and fixed != size:
            yield f"{schedule} has {size} {what}, and {what} were fixed to {fixed}"


def _of_family(family: str, constraints: Constraints, profile: LayerProfile, devices: int) -> Iterator[str]:
    """Yields a refusal if the family has no schedule for any number of groups and stages that the
    constraints allow: the message for the largest numbers."""
    most, refusals = constraints.num_stages or len(profile.layers), list[str]()
    for groups in [constraints.groups] if constraints.groups else range(1, min(devices, most) + 1):
        for stages in [constraints.num_stages] if constraints.num_stages else range(groups, most + 1):
            try:
                build(family, groups, stages, profile.slices)
            except ValueError as error:
                refusals.append(str(error))
            else:
                return
    yield from refusals[-1:]


def _of_microbatches(constraints: Constraints, profile: LayerProfile) -> Iterator[str]:
    number, of_step = constraints.num_microbatches, profile.num_microbatches
    if number is not None and of_step not in (None, number) and profile.rows > 1:
        yield f"the step itself has {of_step} microbatches, and num_microbatches={number} was asked for"
    elif number is not None and profile.rows % number:
        yield f"num_microbatches={number} does not divide the {profile.rows} rows of the batch"


def _of_submeshes(constraints: Constraints, profile: LayerProfile, cluster: AnyCluster) -> Iterator[str]:
    devices, groups, submesh = cluster.num_devices, constraints.groups or 1, constraints.submesh
    if submesh is None:
        if constraints.fsdp and devices == 1:
            yield "fsdp=True needs several devices; the cluster has one"
        elif constraints.fsdp and groups == devices:
            yield f"fsdp=True needs a group of several devices; groups={groups} have one each"
        return
    if isinstance(submesh, tuple) and len(submesh) != groups:
        yield f"submesh has the devices of {len(submesh)} groups, and there are to be {groups}"
        return
    if isinstance(submesh, tuple):
        each, which = submesh, "groups of submesh"
    else:
        each = (submesh,) * groups
        which = f"{groups} groups of {submesh}" if groups > 1 else f"a group of {submesh}"
    sizes = [math.prod(of_group.values()) for of_group in each]
    if sum(sizes) > devices:
        yield f"{which} would have {sum(sizes)} devices; the cluster has {devices}"
    elif uneven := [n for n in sizes if all(n % -(-n // pool.devices_per_node) for pool in cluster.pools)]:
        nodes = " or ".join(map(_nodes_text, cluster.pools))
        yield f"the {uneven[0]} devices of a group do not divide over its nodes; the cluster has {nodes}"
    if constraints.fsdp and all(of_group.get("data", 1) == 1 for of_group in each):
        yield f"fsdp=True divides weights over data, along which submesh={submesh} has one device"
    rows = profile.rows // (constraints.num_microbatches or 1)
    for of_group in constraints.submeshes:
        for kind, number in of_group.items():
            largest = profile.largest(kind)
            if kind == "data" and rows % number:
                yield f"data={number} does not divide the {rows} rows that a microbatch has at most"
            elif kind != "data" and number > 1 and largest is None:
                yield f"{kind}={number} was asked for, and the step has nothing to divide along {kind}"
            elif kind != "data" and (largest or 1) % number:
                yield f"{kind}={number} does not divide {largest}, the size of what it would divide"


def _of_sequence_parallel(
    constraints: Constraints, profile: LayerProfile, cluster: AnyCluster
) -> Iterator[str]:
    if not constraints.sequence_parallel:
        return
    asked = "sequence_parallel=True divides values between tensor-parallel regions over model"
    if not profile.can_be_sequence_parallel:
        if profile.slices > 1:
            yield f"{asked}; the loss is a loop over slices of its sequences, which are not divided further"
        else:
            yield f"{asked}; the step has none that can be divided: it has no loop, or no weights for model"
        return
    if cluster.num_devices == 1:
        yield f"{asked}; the cluster has one device"
    submeshes = [*map(Submesh.of, constraints.submeshes)]
    if submeshes and all(submesh.model == 1 for submesh in submeshes):
        yield f"{asked}, along which submesh={constraints.submesh} has one device"
    for submesh in submeshes:
        if profile.between == "sequence":
            size, of = profile.largest("sequence") or 0, "sequences"
            devices = submesh.sequence * submesh.model
        else:
            size, of = profile.rows // (constraints.num_microbatches or 1), "rows of a microbatch"
            devices = submesh.data * submesh.model
        if size % devices:
            yield f"{asked}; {devices} devices of {dict(submesh)} do not divide {of} of {size}"


MOST_CANDIDATES = 8

MOST_NODES = 4096


def infeasible(space: SearchSpace) -> str:
    cluster = space.model.cluster
    evaluations = [e for estimate in estimates(space).smallest if (e := best_cut(space, estimate.candidate))]
    if not evaluations:
        return (
            f"there is no way to run the step as fixed on {space.num_devices} devices: no schedule has "
            f"these numbers of stages and groups, with devices that divide {space.profile.rows} rows"
        )
    least = min(evaluations, key=lambda evaluation: evaluation.missing_bytes(cluster))
    changes = " or ".join(_nearest(space))
    remedies = f"it would fit with {changes}" if changes else f"nor does it on {MOST_NODES} such nodes"
    return (
        f"the step does not fit: a device needs at least {human_bytes(least.prediction.memory.total)} "
        f"({candidate_text(least.candidate)}), and has {human_bytes(least.capacity(cluster))}; {remedies}"
    )


def _nearest(space: SearchSpace) -> Iterator[str]:
    """Changes of one constraint, or of the number of nodes, with which a candidate fits."""
    constraints = space.constraints
    for field in dataclasses.fields(Constraints):
        value = getattr(constraints, field.name)
        if value is None:
            continue
        changes = {field.name: None}
        if field.name in ("layers_per_stage", "schedule"):
            changes["num_stages"] = None  # they can hardly change while the number of stages stays
        changed = combined(dataclasses.replace(constraints, **changes), space.profile)
        if changed != constraints and _first_that_fits(SearchSpace(space.model, changed)):
            yield f"another {field.name} than {value}"
    larger = space.model.cluster
    while (
        sum(pool.nodes for pool in larger.pools) <= MOST_NODES / 2 and larger.num_devices <= MOST_DEVICES / 2
    ):
        larger = larger.with_nodes(2)
        if fitting := _first_that_fits(SearchSpace(CostModel(space.profile, larger), constraints)):
            nodes = " and ".join(map(_nodes_text, larger.pools))
            yield f"{nodes} ({candidate_text(fitting.candidate)})"
            return


def _nodes_text(pool: Hardware) -> str:
    devices = "one device" if pool.devices_per_node == 1 else f"{pool.devices_per_node} devices"
    return f"{pool.nodes} nodes of {devices}"


def _first_that_fits(space: SearchSpace) -> Row | None:
    found = estimates(space)
    for estimate in found.fastest[:MOST_CANDIDATES] + found.smallest[:MOST_CANDIDATES]:
        evaluation = best_cut(space, estimate.candidate)
        if evaluation and evaluation.missing_bytes(space.model.cluster) <= 0:
            return evaluation
    return None
