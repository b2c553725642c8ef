"""What contradicts in what is fixed: one thing another, the step, or the cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from mpmd.planner.fixed import Fixed
from mpmd.planner.hardware import Hardware
from mpmd.planner.profile import Kind, Profile
from mpmd.schedules import FAMILIES, Schedule


def combined(fixed: Fixed, profile: Profile) -> Fixed:
    """With what follows from what is fixed, and from the step, where nothing else is said."""
    layers = fixed.layers_per_stage
    if layers is None and profile.are_stages:
        layers = (1,) * len(profile.layers)
    schedule = fixed.schedule if isinstance(fixed.schedule, Schedule) else None
    stages = len(layers) if layers else schedule.num_stages if schedule else None
    return dataclasses.replace(
        fixed,
        layers_per_stage=layers,
        num_stages=fixed.num_stages or stages,
        groups=fixed.groups or (schedule.mpmd_dim if schedule else _num_submeshes(fixed)),
        num_microbatches=fixed.num_microbatches or profile.num_microbatches,
    )


def _num_submeshes(fixed: Fixed) -> int | None:
    """The number of groups, if each has a submesh."""
    return len(fixed.submesh) if isinstance(fixed.submesh, tuple) else None


def contradictions(fixed: Fixed, profile: Profile, cluster: Hardware) -> Iterator[str]:
    """All of them, each with the numbers. ``fixed`` is as ``combined`` returns it."""
    yield from _of_stages(fixed, profile)
    yield from _of_groups(fixed, profile, cluster)
    yield from _of_schedule(fixed, profile, cluster.nodes * cluster.devices_per_node)
    yield from _of_microbatches(fixed, profile)
    yield from _of_submesh(fixed, profile, cluster)


def _of_stages(fixed: Fixed, profile: Profile) -> Iterator[str]:
    layers, stages, num_layers = fixed.layers_per_stage, fixed.num_stages, len(profile.layers)
    if layers is not None and profile.are_stages and layers != (1,) * num_layers:
        yield f"the step's marks make {num_layers} stages, which layers_per_stage={layers} cannot cut anew"
    elif layers is not None and sum(layers) != num_layers:
        yield f"layers_per_stage={layers} has {sum(layers)} layers; the step has {num_layers}"
    if fixed.num_layers is not None and profile.decided is None:
        yield f"a step without a loop is one layer, and num_layers={fixed.num_layers} was asked for"
    elif fixed.num_layers is not None and profile.are_stages:
        yield f"the step's marks make {num_layers} stages; num_layers={fixed.num_layers} is for one without"
    elif fixed.num_layers not in (None, num_layers):
        yield f"num_layers={fixed.num_layers} was asked for; the step has {num_layers}"
    if profile.are_stages and stages not in (None, num_layers):
        yield f"the step's marks make {num_layers} stages, and num_stages={stages} was asked for"
    elif layers is not None and stages not in (None, len(layers)):
        yield f"layers_per_stage={layers} makes {len(layers)} stages, and num_stages={stages} was asked for"
    elif stages is not None and stages > num_layers:
        yield f"num_stages={stages} needs as many layers; the step has {num_layers}"
    if fixed.remat and profile.are_stages:
        yield (
            "remat=True has layers that are found computed again; this step says its stages itself: put "
            "jax.checkpoint around its own layers"
        )


def _of_groups(fixed: Fixed, profile: Profile, cluster: Hardware) -> Iterator[str]:
    groups, devices = fixed.groups, cluster.nodes * cluster.devices_per_node
    if groups is None:
        return
    if groups > devices:
        yield f"groups={groups} need a device each; the cluster has {devices}"
    stages = fixed.num_stages or len(profile.layers)
    if groups > stages:
        what = "stages" if fixed.num_stages else "layers"
        yield f"groups={groups} need a stage each; the step has {stages} {what}"


def _of_schedule(fixed: Fixed, profile: Profile, devices: int) -> Iterator[str]:
    schedule = fixed.schedule
    if schedule is None:
        return
    name = schedule if isinstance(schedule, str) else schedule.name
    if profile.has_backward == (name == "ForwardOnly"):
        does = "has backwards" if profile.has_backward else "has no backwards"
        yield f"the step {does}; {name} is for steps that {'have none' if profile.has_backward else 'do'}"
    if isinstance(schedule, Schedule):
        sizes = (("num_stages", schedule.num_stages), ("groups", schedule.mpmd_dim))
        for field, size in sizes:
            if getattr(fixed, field) not in (None, size):
                what = field.removeprefix("num_")
                yield f"{schedule} has {size} {what}, and {what} were fixed to {getattr(fixed, field)}"
    else:
        yield from _of_family(fixed, profile, devices)


def _of_family(fixed: Fixed, profile: Profile, devices: int) -> Iterator[str]:
    """What the family says of the last of the sizes that are open, if it has none of them."""
    assert isinstance(fixed.schedule, str), f"{fixed.schedule} has a size"
    most = fixed.num_stages or len(profile.layers)
    refusal = ""
    for groups in [fixed.groups] if fixed.groups else range(1, min(devices, most) + 1):
        for stages in [fixed.num_stages] if fixed.num_stages else range(groups, most + 1):
            try:
                FAMILIES[fixed.schedule].build(groups, stages)
            except ValueError as error:
                refusal = str(error)
            else:
                return
    if refusal:
        yield refusal


def _of_microbatches(fixed: Fixed, profile: Profile) -> Iterator[str]:
    number = fixed.num_microbatches
    if number is not None and profile.num_microbatches not in (None, number):
        yield (
            f"the step itself has {profile.num_microbatches} microbatches, and num_microbatches={number} was "
            "asked for"
        )
    elif number is not None and profile.rows % number:
        yield f"num_microbatches={number} does not divide the {profile.rows} rows of the batch"


def _of_submesh(fixed: Fixed, profile: Profile, cluster: Hardware) -> Iterator[str]:
    devices, groups = cluster.nodes * cluster.devices_per_node, fixed.groups or 1
    if not fixed.submeshes:
        if fixed.fsdp and devices == 1:
            yield "fsdp=True needs several devices; the cluster has one"
        elif fixed.fsdp and groups == devices:
            yield f"fsdp=True needs a group of several devices; groups={groups} have one each"
        return
    if _num_submeshes(fixed) not in (None, groups):
        yield f"submesh has the devices of {_num_submeshes(fixed)} groups, and there are to be {groups}"
        return
    each = fixed.submeshes * (1 if isinstance(fixed.submesh, tuple) else groups)
    if (size := sum(math.prod(submesh.values()) for submesh in each)) > devices:
        if isinstance(fixed.submesh, tuple):
            which = "groups of submesh"
        else:
            which = f"{groups} groups of {fixed.submesh}" if groups > 1 else f"a group of {fixed.submesh}"
        yield f"{which} would have {size} devices; the cluster has {devices}"
    if fixed.fsdp and all(submesh.get("data", 1) == 1 for submesh in each):
        yield f"fsdp=True divides weights over data, along which submesh={fixed.submesh} has one device"
    for submesh in fixed.submeshes:
        yield from _of_division(submesh, fixed, profile)


def _of_division(submesh: Mapping[Kind, int], fixed: Fixed, profile: Profile) -> Iterator[str]:
    rows = profile.rows // (fixed.num_microbatches or 1)
    for kind, number in submesh.items():
        sizes = [layer.divisions[kind].largest for layer in profile.layers if kind in layer.divisions]
        if kind == "data" and rows % number:
            yield f"data={number} does not divide the {rows} rows that a microbatch has at most"
        elif kind != "data" and number > 1 and not sizes:
            yield f"{kind}={number} was asked for, and the step has nothing to divide along {kind}"
        elif kind != "data" and math.gcd(*sizes) % number:
            yield f"{kind}={number} does not divide {math.gcd(*sizes)}, the size of what it would divide"
