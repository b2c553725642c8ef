"""The shapes of groups and their processes that ``launch`` is asked for, and their faults."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from jax.sharding import AxisType

from mpmd.ir.reshard import GroupShape
from mpmd.validation import (
    Fault,
    counted,
    device_count_fault,
    int_fault,
    int_faults,
    is_int,
    is_sequence,
    number_fault,
    sequence_fault,
    shown,
    str_fault,
    type_fault,
)

GPU_PLATFORMS = ("cuda", "rocm")

MOST_PROCESSES = 40_000
"""Ray is tested with as many actors in a cluster, says its scalability envelope."""


_AXES = "a dict of axis names and sizes, as {'stage': 4}"


def _groups_faults(name: str, groups: Any) -> Iterator[Fault | None]:
    if groups is not None:
        yield sequence_fault(name, groups, "a sequence with the axes of each group, as [{'data': 4}]")
    for mpmd_idx, axes in enumerate(groups if is_sequence(groups) else ()):
        yield type_fault(f"{name}[{mpmd_idx}]", axes, Mapping, _AXES)


def _axis_types_faults(name: str, types: Any) -> Iterator[Fault | None]:
    kinds = [*types.values()] if isinstance(types, Mapping) else [] if types is None else [types]
    for kind in kinds:
        yield type_fault(
            name, kind, AxisType, "of jax.sharding.AxisType, or a dict of these by the names of axes"
        )
    if AxisType.Manual in kinds:
        yield ValueError(f"{name} must be Auto or Explicit: axes are Manual within a jax.shard_map only")


def _processes_faults(name: str, processes: Any) -> Iterator[Fault | None]:
    if is_sequence(processes):
        yield from int_faults(name, processes, -math.inf)
    elif processes is not None and not is_int(processes):
        yield TypeError(
            f"{name} must be a whole number, or a sequence with one for each group, not {shown(processes)}"
        )


def _accelerators_faults(name: str, types: Any) -> Iterator[Fault | None]:
    if is_sequence(types):
        yield from (str_fault(f"{name}[{mpmd_idx}]", each) for mpmd_idx, each in enumerate(types))
    elif types is not None and not isinstance(types, str):
        what = "the name of an accelerator type, such as 'H100', or a sequence with one for each group"
        yield TypeError(f"{name} must be {what}, not {shown(types)}")


def _platform_fault(name: str, platform: Any) -> Fault | None:
    if platform is None or (platform and "," not in platform):
        return None
    what = "one platform for all processes, such as 'cpu' or 'cuda'"
    return ValueError(f"{name} must be {what}, not {platform!r}")


def _whole_fault(name: str, gpus: Any) -> Fault | None:
    if gpus is None or gpus <= 1 or not gpus % 1:
        return None
    return ValueError(f"{name} must be whole where it is more than one, not {gpus}")


OPTIONAL_STR = functools.partial(str_fault, optional=True)
_CPUS = functools.partial(number_fault, above=0, finite=True, optional=True)
_GPUS = functools.partial(number_fault, least=0, finite=True, optional=True)


class LaunchRequest(NamedTuple):
    mesh_shape: Annotated[
        Mapping[str, int] | None, functools.partial(type_fault, types=Mapping, what=_AXES, optional=True)
    ]
    mpmd_axis: Annotated[str | None, OPTIONAL_STR]
    groups: Annotated[Sequence[Mapping[str, int]] | None, _groups_faults]
    processes_per_group: Annotated[int | Sequence[int] | None, _processes_faults] = None
    platform: Annotated[str | None, OPTIONAL_STR, _platform_fault] = None
    cpus_per_group: Annotated[float | None, _CPUS] = None
    gpus_per_group: Annotated[float | None, _GPUS, _whole_fault] = None
    axis_types: Annotated[Mapping[str, AxisType] | AxisType | None, _axis_types_faults] = None
    accelerator_types: Annotated[Sequence[str] | str | None, _accelerators_faults] = None


def groups_faults(request: LaunchRequest) -> Iterator[Fault | None]:
    """The faults that need no node to notice: ``shapes_of`` compares the groups with the nodes' resources."""
    faults = [fault for fault in _submeshes_faults(request) if fault]
    yield from faults
    if not faults:
        submeshes = submeshes_of(request)
        yield from _named_axes_faults(request, submeshes)
        yield from _counts_faults(request, submeshes)


def submeshes_of(request: LaunchRequest) -> list[dict[str, int]]:
    """The axis names and sizes of each group's submesh; all have the same names, in the same order."""
    if request.groups is None:
        shape, axis = request.mesh_shape, request.mpmd_axis
        assert shape is not None and axis is not None, "it was checked"
        return [{**shape, axis: 1} for _ in range(shape[axis])]
    names = dict.fromkeys(name for axes in request.groups for name in axes)
    return [{name: axes.get(name, 1) for name in names} for axes in request.groups]


def axis_types_of(request: LaunchRequest) -> dict[str, AxisType]:
    types = request.axis_types
    if isinstance(types, AxisType):
        types = dict.fromkeys(submeshes_of(request)[0], types)
    return {axis: kind for axis, kind in (types or {}).items() if kind is not AxisType.Auto}


def accelerator_types_of(request: LaunchRequest, num_groups: int) -> list[str | None]:
    types = request.accelerator_types
    return [types] * num_groups if types is None or isinstance(types, str) else [*types]


def spares_fault(request: LaunchRequest, num_spares: int) -> Fault | None:
    """The fault of spares beside groups of several accelerator types: a spare replaces any group."""
    types = dict.fromkeys(accelerator_types_of(request, len(submeshes_of(request))))
    if not num_spares or len(types) == 1:
        return None
    return ValueError(
        f"recovery has {num_spares} spares, and a spare is of one accelerator type, but groups are on "
        f"{' and '.join(map(str, types))}: leave the spares out, and a group that dies starts on another "
        "node of its type"
    )


def shapes_of(
    request: LaunchRequest, platform: str, gpus_of_nodes: Sequence[float]
) -> tuple[GroupShape, ...]:
    """The shapes for a request without faults.

    Raises: ``ValueError`` when processes get fewer GPUs than they have devices.
    """
    submeshes = submeshes_of(request)
    processes = request.processes_per_group
    if processes is None:
        devices = [math.prod(axes.values()) for axes in submeshes]
        gpus: Sequence[float] = devices if platform in GPU_PLATFORMS else [0] * len(devices)
        if request.gpus_per_group is not None:
            gpus = [request.gpus_per_group] * len(devices)
        processes = fewest_processes(devices, gpus, gpus_of_nodes)
    counts = _process_counts(processes, len(submeshes))
    shapes = tuple(GroupShape(axes, count) for axes, count in zip(submeshes, counts, strict=True))
    if platform in GPU_PLATFORMS and request.gpus_per_group:
        _check_gpus(shapes, request.gpus_per_group)
    return shapes


def _process_counts(processes: int | Sequence[int], num_groups: int) -> list[int]:
    return [processes] * num_groups if isinstance(processes, int) else list(processes)


def fewest_processes(
    devices: Sequence[int], gpus: Sequence[float], gpus_of_nodes: Sequence[float]
) -> list[int]:
    """The fewest processes of each group with which each process finds its GPUs on one node.

    The groups with most GPUs choose first, each as few processes as the GPUs that are left allow. If the
    nodes have too few for all groups, a group gets as many as it would need on nodes like the largest one,
    because a cluster may grow; ``reserve`` then reports the missing resources.

    Args:
      devices: the number of devices of each group.
      gpus: the number of GPUs that each group reserves.
      gpus_of_nodes: how many GPUs each node has.
    """
    free = [int(gpus) for gpus in gpus_of_nodes if gpus >= 1]
    counts = [1] * len(devices)
    if not free:
        return counts
    largest = max(free)
    for group in sorted(range(len(devices)), key=lambda group: -gpus[group]):
        if gpus[group] < 1:
            continue
        needs = {n: int(gpus[group]) // n for n in _divisors(devices[group]) if gpus[group] % n == 0}
        fitting = [n for n, need in needs.items() if sum(left // need for left in free) >= n]
        if fitting:
            counts[group] = fitting[0]
            free = _without(free, fitting[0], needs[fitting[0]])
        else:
            counts[group] = next((n for n, need in needs.items() if need <= largest), max(needs))
    return counts


def _without(free: Sequence[int], processes: int, need: int) -> list[int]:
    """The GPUs left on each node when ``processes`` have taken ``need`` GPUs each, fullest nodes first."""
    left = []
    for gpus in sorted(free):
        taken = min(processes, gpus // need)
        processes -= taken
        left.append(gpus - taken * need)
    return left


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _check_gpus(shapes: Sequence[GroupShape], gpus: float) -> None:
    faults = []
    for mpmd_idx, shape in enumerate(shapes):
        if math.ceil(gpus / shape.num_processes) < shape.devices_per_process:
            faults.append(
                f"gpus_per_group={gpus:g} gives each of the {shape.num_processes} processes of group "
                f"{mpmd_idx} {gpus / shape.num_processes:g} GPUs for {shape.devices_per_process} devices; "
                "leave gpus_per_group out for a GPU for each device"
            )
    if faults:
        raise ValueError("\n".join(faults))


def _submeshes_faults(request: LaunchRequest) -> Iterator[Fault | None]:
    mesh_shape, mpmd_axis, groups = request.mesh_shape, request.mpmd_axis, request.groups
    if groups is None and (mesh_shape is None or mpmd_axis is None):
        yield ValueError("launch needs mesh_shape and mpmd_axis, or groups")
        return
    shapes = {f"groups[{mpmd_idx}]": axes for mpmd_idx, axes in enumerate(groups or ())}
    if groups is None:
        assert mesh_shape is not None, "it was looked at above"
        shapes = {"mesh_shape": mesh_shape}
        if mpmd_axis not in mesh_shape:
            names = ", ".join(map(str, mesh_shape))
            yield ValueError(f"mesh_shape has no axis mpmd_axis={mpmd_axis!r}; its axes are {names}")
    elif mesh_shape is not None or mpmd_axis is not None:
        yield ValueError("give groups, or mesh_shape and mpmd_axis, and not both")
    elif not groups:
        yield ValueError(
            "groups is empty: give the axes of each group's submesh, such as [{'data': 4}, {'data': 2}]"
        )
    sizes = [fault for name, axes in shapes.items() for fault in axes_faults(name, axes) if fault]
    yield from sizes
    if not sizes:
        num_groups = len(shapes) if mpmd_axis is None else shapes.get("mesh_shape", {}).get(mpmd_axis, 1)
        if num_groups > MOST_PROCESSES:
            yield ValueError(
                f"{counted(num_groups)} groups, each a process at least, are more than the {MOST_PROCESSES} "
                "processes that a Ray cluster can have"
            )
        yield device_count_fault(sum(math.prod(axes.values()) for axes in shapes.values()))


def axes_faults(name: str, axes: Mapping[Any, Any]) -> Iterator[Fault | None]:
    for axis, size in axes.items():
        yield str_fault(f"the name of an axis in {name}", axis)
        yield int_fault(f"{name}[{axis!r}]", size)


def _named_axes_faults(request: LaunchRequest, submeshes: Sequence[Mapping[str, int]]) -> Iterator[Fault]:
    for axis in request.axis_types if isinstance(request.axis_types, Mapping) else ():
        if axis not in submeshes[0]:
            yield ValueError(
                f"axis_types names the axis {axis!r}; the axes of groups are {', '.join(submeshes[0])}"
            )


def _counts_faults(request: LaunchRequest, submeshes: Sequence[Mapping[str, int]]) -> Iterator[Fault]:
    num_groups, gpus = len(submeshes), request.gpus_per_group
    types = accelerator_types_of(request, num_groups)
    if len(types) != num_groups:
        yield ValueError(f"accelerator_types has {len(types)} names, but there are {num_groups} groups")
    if "" in types:
        yield ValueError("accelerator_types must be names, such as 'H100', and one is empty")
    counts = _process_counts(
        1 if request.processes_per_group is None else request.processes_per_group, num_groups
    )
    if len(counts) != num_groups:
        yield ValueError(f"processes_per_group has {len(counts)} numbers, but there are {num_groups} groups")
        return
    for mpmd_idx, (axes, count) in enumerate(zip(submeshes, counts, strict=True)):
        devices = math.prod(axes.values())
        if count < 1 or devices % count:
            possible = ", ".join(map(str, _divisors(devices)))
            yield ValueError(
                f"the {devices} devices of group {mpmd_idx} do not divide over processes_per_group={count}; "
                f"possible are {possible}"
            )
        elif gpus and gpus >= 1 and not gpus % 1 and gpus % count:
            yield ValueError(
                f"gpus_per_group={gpus:g} does not divide over the {count} processes of group {mpmd_idx}"
            )
