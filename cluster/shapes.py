"""The shapes of groups that ``launch`` is asked for, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence


def submeshes_of(
    mesh_shape: Mapping[str, int] | None, mpmd_axis: str | None, groups: Sequence[Mapping[str, int]] | None
) -> list[dict[str, int]]:
    """The axis names and sizes of each group's submesh; all have the same names, in the same order.

    Raises: ``ValueError`` with all that is wrong with the arguments, which are those of ``launch``.
    """
    faults = [*_faults(mesh_shape, mpmd_axis, groups)]
    if faults:
        raise ValueError("\n".join(faults))
    if groups is None:
        assert mesh_shape is not None and mpmd_axis is not None, "it was checked"
        return [{**mesh_shape, mpmd_axis: 1} for _ in range(mesh_shape[mpmd_axis])]
    names = dict.fromkeys(name for axes in groups for name in axes)
    return [{name: axes.get(name, 1) for name in names} for axes in groups]


def _faults(
    mesh_shape: Mapping[str, int] | None, mpmd_axis: str | None, groups: Sequence[Mapping[str, int]] | None
) -> Iterator[str]:
    if groups is not None:
        if mesh_shape is not None or mpmd_axis is not None:
            yield "give groups, or mesh_shape and mpmd_axis, and not both"
        if not groups:
            yield "groups is empty: give the axes of each group's submesh, such as [{'data': 4}, {'data': 2}]"
        for mpmd_idx, axes in enumerate(groups):
            yield from (f"group {mpmd_idx}: {fault}" for fault in _faults_of_sizes(axes))
    elif mesh_shape is None or mpmd_axis is None:
        yield "launch needs mesh_shape and mpmd_axis, or groups"
    else:
        if mpmd_axis not in mesh_shape:
            yield f"mesh_shape has no axis {mpmd_axis!r}; its axes are {', '.join(mesh_shape)}"
        yield from _faults_of_sizes(mesh_shape)


def _faults_of_sizes(axes: Mapping[str, int]) -> Iterator[str]:
    for axis, size in axes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            yield f"the size of axis {axis!r} must be a positive int, not {size!r}"


def each(processes: int | Sequence[int], num_groups: int) -> list[int]:
    """The number of processes of each group."""
    return [processes] * num_groups if isinstance(processes, int) else list(processes)


def check_resources(
    submeshes: Sequence[Mapping[str, int]],
    processes: int | Sequence[int] | None,
    cpus: float | None,
    gpus: float | None,
) -> None:
    """Raises ``ValueError`` with all that is wrong with what ``launch`` is asked to give each group."""
    faults = []
    if cpus is not None and cpus <= 0:
        faults.append(f"cpus_per_group must be positive, not {cpus}")
    if gpus is not None and gpus < 0:
        faults.append(f"gpus_per_group must not be negative, not {gpus}")
    if processes is not None:
        faults += _faults_of_processes(submeshes, each(processes, len(submeshes)), gpus)
    if faults:
        raise ValueError("\n".join(faults))


def _faults_of_processes(
    submeshes: Sequence[Mapping[str, int]], counts: Sequence[int], gpus: float | None
) -> Iterator[str]:
    if len(counts) != len(submeshes):
        yield f"processes_per_group has {len(counts)} numbers, but there are {len(submeshes)} groups"
        return
    for mpmd_idx, (axes, count) in enumerate(zip(submeshes, counts, strict=True)):
        devices = math.prod(axes.values())
        if count < 1 or devices % count:
            possible = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
            yield (
                f"the {devices} devices of group {mpmd_idx} do not divide over processes_per_group={count}; "
                f"possible are {possible}"
            )
        elif gpus and gpus >= 1 and gpus % count:
            yield f"gpus_per_group={gpus:g} does not divide over the {count} processes of group {mpmd_idx}"
