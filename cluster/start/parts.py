"""The parts of a mesh that ``launch`` is asked for: shapes with their groups, or numbers of groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from cluster.start.shapes import axes_faults
from mpmd.validation import Fault, raise_faults, shown, str_fault, type_fault

SHAPES = 'a dict of names and shapes, as {"actor": {"stage": 4}, "sampler": {"stage": 2, "model": 2}}'


class GroupsOfParts(NamedTuple):
    mpmd_axis: str
    groups: Sequence[Mapping[str, int]]
    parts: Mapping[str, int]


def are_shapes(parts: Any) -> TypeGuard[Mapping[str, Mapping[str, int]]]:
    return isinstance(parts, Mapping) and any(isinstance(shape, Mapping) for shape in parts.values())


def groups_of_parts(parts: Mapping[str, Mapping[str, int]], mpmd_axis: str | None) -> GroupsOfParts:
    """The groups of parts that are given as shapes.

    Args:
      mpmd_axis: the axis along which the groups of each part are; by default, the first one of each shape.

    Raises: ``TypeError`` and ``ValueError`` for other values.
    """
    raise_faults(*_type_faults(parts), str_fault("mpmd_axis", mpmd_axis, optional=True), title=_TITLE)
    axis = next(iter(next(iter(parts.values())))) if mpmd_axis is None else mpmd_axis
    raise_faults(*_axis_faults(parts, axis, mpmd_axis is None), title=_TITLE)
    return GroupsOfParts(
        mpmd_axis=axis,
        groups=[{**shape, axis: 1} for shape in parts.values() for _ in range(shape[axis])],
        parts={name: shape[axis] for name, shape in parts.items()},
    )


_TITLE = "mpmd.launch: "


def alone_faults(mesh_shape: Any, groups: Any) -> Iterator[Fault | None]:
    for name, shape in (("mesh_shape", mesh_shape), ("groups", groups)):
        if shape is not None:
            yield ValueError(
                f"leave out {name}: parts has a shape for each part; or give numbers of groups in it"
            )


def _type_faults(parts: Mapping[Any, Any]) -> Iterator[Fault | None]:
    for name, shape in parts.items():
        yield str_fault("the name of a part", name)
        fault = type_fault(
            f"parts[{name!r}]", shape, Mapping, "a dict of axis names and sizes, as the others"
        )
        yield fault
        if fault is None:
            if not shape:
                yield ValueError(f"parts[{name!r}] has no axis; give {SHAPES}")
            yield from axes_faults(f"parts[{name!r}]", shape)


def _axis_faults(parts: Mapping[str, Mapping[str, int]], axis: str, is_first: bool) -> Iterator[Fault | None]:
    for name, shape in parts.items():
        if axis not in shape:
            names = ", ".join(shape)
            yield ValueError(f"parts[{name!r}] has no axis mpmd_axis={axis!r}; its axes are {names}")
        elif is_first and next(iter(shape)) != axis:
            yield ValueError(
                f"parts[{name!r}] begins with the axis {shown(next(iter(shape)))}, and another part with "
                f"{axis!r}: name the axis of the groups, mpmd_axis={axis!r}"
            )
