"""Conflicts between the constraints, the step and the cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from mpmd.language.remat import Remat
from mpmd.planner.constraints import Constraints
from mpmd.planner.layer_profile import Kind, LayerProfile
from mpmd.planner.pools import AnyCluster
from mpmd.planner.search.families import build
from mpmd.planner.submesh import Submesh
from mpmd.schedules import Schedule, Seq1F1B
from mpmd.util.tables import first_few


def combined(constraints: Constraints, profile: LayerProfile) -> Constraints:
    """The constraints with all that follows from them and from the step."""
    layers = constraints.layers_per_stage
    if layers is None and profile.are_stages:
        layers = (1,) * len(profile.layers)
    schedule = constraints.schedule if isinstance(constraints.schedule, Schedule) else None
    stages = len(layers) if layers else schedule.num_stages if schedule else None
    if stages is None and constraints.remat is not None and len(constraints.remat) > 1:
        stages = len(constraints.remat)
    return dataclasses.replace(
        constraints,
        layers_per_stage=layers,
        num_stages=constraints.num_stages or stages,
        groups=constraints.groups or (schedule.mpmd_dim if schedule else _num_submeshes(constraints)),
        num_microbatches=constraints.num_microbatches or profile.num_microbatches,
    )


def _num_submeshes(constraints: Constraints) -> int | None:
    """The number of groups, if each has a submesh."""
    return len(constraints.submesh) if isinstance(constraints.submesh, tuple) else None


def contradictions(constraints: Constraints, profile: LayerProfile, cluster: AnyCluster) -> Iterator[str]:
    """All conflicts, each with the numbers. ``constraints`` are as ``combined`` returns them."""
    yield from _of_stages(constraints, profile)
    yield from _of_groups(constraints, profile, cluster)
    yield from _of_schedule(constraints, profile, cluster.num_devices)
    yield from _of_microbatches(constraints, profile)
    yield from _of_submesh(constraints, profile, cluster)
    yield from _of_sequence_parallel(constraints, profile, cluster)


def _of_stages(constraints: Constraints, profile: LayerProfile) -> Iterator[str]:
    layers, stages, num_layers = constraints.layers_per_stage, constraints.num_stages, len(profile.layers)
    if layers is not None and profile.are_stages and layers != (1,) * num_layers:
        yield f"the step's marks make {num_layers} stages, which layers_per_stage={layers} cannot cut anew"
    elif layers is not None and sum(layers) != num_layers:
        has = f"the step has {num_layers} {_names_text(profile)}"
        yield f"layers_per_stage={layers} has {sum(layers)} layers; {has}"
    if constraints.num_layers is not None and profile.decision_index is None:
        yield f"a step without a loop is one layer, and num_layers={constraints.num_layers} was asked for"
    elif constraints.num_layers is not None and profile.are_stages:
        asked = f"num_layers={constraints.num_layers}"
        yield f"the step's marks make {num_layers} stages; {asked} is for one without"
    elif constraints.num_layers not in (None, num_layers):
        has = f"the step has {num_layers} {_names_text(profile)}"
        yield f"num_layers={constraints.num_layers} was asked for; {has}"
    if profile.are_stages and stages not in (None, num_layers):
        yield f"the step's marks make {num_layers} stages, and num_stages={stages} was asked for"
    elif layers is not None and stages not in (None, len(layers)):
        yield f"layers_per_stage={layers} makes {len(layers)} stages, and num_stages={stages} was asked for"
    elif stages is not None and stages > num_layers:
        yield f"num_stages={stages} needs as many layers; the step has {num_layers} {_names_text(profile)}"
    policies = constraints.remat or (Remat.NONE,)
    if len(policies) > 1 and stages not in (None, len(policies)):
        yield f"remat has the policies of {len(policies)} stages, and there are to be {stages}"
    if policies != (Remat.NONE,) and profile.are_stages:
        asked = "True" if policies == (Remat.NOTHING_SAVEABLE,) else ", ".join(policies)
        yield (
            f"remat={asked} has layers that are found computed again; this step says its stages itself: put "
            "jax.checkpoint around its own layers"
        )


def _names_text(profile: LayerProfile) -> str:
    names = (f"layer {number}: {layer.name}" for number, layer in enumerate(profile.layers))
    return f"({first_few(names, 5)})"


def _of_groups(constraints: Constraints, profile: LayerProfile, cluster: AnyCluster) -> Iterator[str]:
    groups, devices = constraints.groups, cluster.num_devices
    if groups is None:
        return
    if groups > devices:
        yield f"groups={groups} need a device each; the cluster has {devices}"
    stages = constraints.num_stages or len(profile.layers)
    if groups > stages:
        has = f"{stages} stages" if constraints.num_stages else f"{stages} layers {_names_text(profile)}"
        yield f"groups={groups} need a stage each; the step has {has}"


def _of_schedule(constraints: Constraints, profile: LayerProfile, devices: int) -> Iterator[str]:
    schedule = constraints.schedule
    if schedule is None:
        return
    name = schedule if isinstance(schedule, str) else schedule.name
    if profile.has_backward == (name == "ForwardOnly"):
        does = "has backwards" if profile.has_backward else "has no backwards"
        yield f"the step {does}; {name} is for steps that {'have none' if profile.has_backward else 'do'}"
    yield from _of_slices(schedule, profile)
    if isinstance(schedule, Schedule):
        sizes = (("num_stages", schedule.num_stages), ("groups", schedule.mpmd_dim))
        for field, size in sizes:
            if getattr(constraints, field) not in (None, size):
                what = field.removeprefix("num_")
                yield f"{schedule} has {size} {what}, and {what} were fixed to {getattr(constraints, field)}"
    else:
        yield from _of_family(constraints, profile, devices)


def _of_slices(schedule: Schedule | str, profile: LayerProfile) -> Iterator[str]:
    is_sliced = schedule == Seq1F1B.__name__ or (isinstance(schedule, Schedule) and schedule.slices > 1)
    if is_sliced and profile.slices == 1:
        yield (
            f"{schedule} is for a loss that is a loop over slices of its sequences, as mpmd.slices cuts "
            "them, with the marks of all stages in each; docs/long_sequences.md shows one"
        )
    elif isinstance(schedule, Schedule) and schedule.slices not in (1, profile.slices):
        yield f"{schedule} has {schedule.slices} slices, and the step's loss is a loop over {profile.slices}"


def _of_family(constraints: Constraints, profile: LayerProfile, devices: int) -> Iterator[str]:
    """Yields a refusal if the family has no schedule for any number of groups and stages that the
    constraints allow: the message for the largest numbers."""
    assert isinstance(constraints.schedule, str), f"{constraints.schedule} has a size"
    most = constraints.num_stages or len(profile.layers)
    refusal = ""
    for groups in [constraints.groups] if constraints.groups else range(1, min(devices, most) + 1):
        for stages in [constraints.num_stages] if constraints.num_stages else range(groups, most + 1):
            try:
                build(constraints.schedule, groups, stages, profile.slices)
            except ValueError as error:
                refusal = str(error)
            else:
                return
    if refusal:
        yield refusal


def _of_microbatches(constraints: Constraints, profile: LayerProfile) -> Iterator[str]:
    number = constraints.num_microbatches
    if number is not None and profile.num_microbatches not in (None, number) and profile.rows > 1:
        yield (
            f"the step itself has {profile.num_microbatches} microbatches, and num_microbatches={number} was "
            "asked for"
        )
    elif number is not None and profile.rows % number:
        yield f"num_microbatches={number} does not divide the {profile.rows} rows of the batch"


def _of_submesh(constraints: Constraints, profile: LayerProfile, cluster: AnyCluster) -> Iterator[str]:
    devices, groups = cluster.num_devices, constraints.groups or 1
    if not constraints.submeshes:
        if constraints.fsdp and devices == 1:
            yield "fsdp=True needs several devices; the cluster has one"
        elif constraints.fsdp and groups == devices:
            yield f"fsdp=True needs a group of several devices; groups={groups} have one each"
        return
    if _num_submeshes(constraints) not in (None, groups):
        yield f"submesh has the devices of {_num_submeshes(constraints)} groups, and there are to be {groups}"
        return
    each = constraints.submeshes * (1 if isinstance(constraints.submesh, tuple) else groups)
    if (size := sum(math.prod(submesh.values()) for submesh in each)) > devices:
        if isinstance(constraints.submesh, tuple):
            which = "groups of submesh"
        else:
            which = (
                f"{groups} groups of {constraints.submesh}"
                if groups > 1
                else f"a group of {constraints.submesh}"
            )
        yield f"{which} would have {size} devices; the cluster has {devices}"
    if constraints.fsdp and all(submesh.get("data", 1) == 1 for submesh in each):
        yield f"fsdp=True divides weights over data, along which submesh={constraints.submesh} has one device"
    for submesh in constraints.submeshes:
        yield from _of_division(submesh, constraints, profile)


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
    rows = profile.rows // (constraints.num_microbatches or 1)
    for submesh in submeshes:
        if profile.between == "sequence":
            sizes = [
                layer.divisions["sequence"].largest
                for layer in profile.layers
                if "sequence" in layer.divisions
            ]
            size, devices, of = math.gcd(*sizes), submesh.sequence * submesh.model, "sequences"
        else:
            size, devices, of = rows, submesh.data * submesh.model, "rows of a microbatch"
        if size % devices:
            yield f"{asked}; {devices} devices of {dict(submesh)} do not divide {of} of {size}"


def _of_division(
    submesh: Mapping[Kind, int], constraints: Constraints, profile: LayerProfile
) -> Iterator[str]:
    rows = profile.rows // (constraints.num_microbatches or 1)
    for kind, number in submesh.items():
        sizes = [layer.divisions[kind].largest for layer in profile.layers if kind in layer.divisions]
        if kind == "data" and rows % number:
            yield f"data={number} does not divide the {rows} rows that a microbatch has at most"
        elif kind != "data" and number > 1 and not sizes:
            yield f"{kind}={number} was asked for, and the step has nothing to divide along {kind}"
        elif kind != "data" and math.gcd(*sizes) % number:
            yield f"{kind}={number} does not divide {math.gcd(*sizes)}, the size of what it would divide"
