"""Groups that are not there: the shape of a mesh of groups, for which steps are planned without devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from mpmd.compat import api_boundary
from mpmd.meshes.part import WholeMesh, parts_faults
from mpmd.runtime.protocol import Runtime
from mpmd.validation import (
    Fault,
    device_count_fault,
    int_fault,
    is_sequence,
    raise_faults,
    str_fault,
    type_fault,
)

Shape = Mapping[str, int] | AbstractMesh
"""The sizes of axes by their names; or a jax mesh without devices, which also has their types."""


class AbstractMpmdMesh(WholeMesh):
    """The shape of a mesh of groups: steps are planned for it, and cannot run on it.

    It needs neither devices nor a cluster, and has the arguments of ``mpmd.launch``: one shape that is cut
    along an axis, or a list with a shape for each group, in which an axis that a group does not name has size
    1::

        mesh = mpmd.AbstractMpmdMesh({"stage": 4, "data": 2}, "stage")
        print(mpmd.jit(train_step, mesh).lower(params, xs, ys).report())

    Args:
      shape: a dict of axes, or a ``jax.sharding.AbstractMesh``; or a list with a shape for each group.
      mpmd_axis_name: the axis along which the groups are; left out for a list.
      parts: the number of groups of each part by its name, as of ``MpmdMesh``.

    Raises: ``TypeError`` for other types; ``ValueError`` for a shape without the axis, for a size that is no
      whole number of at least 1, for more devices than any cluster has, for an empty list, and for a list
      together with an axis.
    """

    @api_boundary
    def __init__(
        self,
        shape: Shape | Sequence[Shape],
        mpmd_axis_name: str | None = None,
        *,
        parts: Mapping[str, int] | None = None,
    ):
        is_one = isinstance(shape, Mapping | AbstractMesh)
        what = "a dict of axes, or a jax AbstractMesh"
        if is_sequence(shape):
            shapes: list[Any] = list(shape)
            faults: list[Fault | None] = [
                type_fault(f"shape[{i}]", one, Mapping | AbstractMesh, what) for i, one in enumerate(shapes)
            ]
        else:
            shapes = [shape]
            faults = [type_fault("shape", shape, Mapping | AbstractMesh, f"{what}; or a list of them")]
        raise_faults(
            *faults, str_fault("mpmd_axis_name", mpmd_axis_name, optional=True), *parts_faults(parts)
        )
        raise_faults(*_faults(shapes, is_one, mpmd_axis_name))
        raise_faults(device_count_fault(sum(math.prod(_sizes(one).values()) for one in shapes)))
        self.mpmd_axis_name = mpmd_axis_name
        self._submeshes = tuple(_submeshes(shapes, mpmd_axis_name))
        raise_faults(*parts_faults(parts, self.mpmd_dim))
        super().__init__(parts)

    @property
    def abstract_submeshes(self) -> tuple[AbstractMesh, ...]:
        """The shape of each group's submesh."""
        return self._submeshes

    @property
    def runtime(self) -> Runtime:
        """There is none. Raises ``RuntimeError``."""
        raise RuntimeError(
            f"{self!r} has no devices: step.lower(...) plans for it, and step.lower(...).compile(mesh) goes "
            "on with a mesh of the same shape that runs, mpmd.MpmdMesh or what mpmd.launch returns"
        )

    def __repr__(self) -> str:
        shapes = [dict(submesh.shape) for submesh in self._submeshes]
        return f"AbstractMpmdMesh of {self.mpmd_dim} groups: {', '.join(map(str, shapes))}"


def _faults(shapes: Sequence[Shape], is_one: bool, mpmd_axis_name: str | None) -> Iterator[Fault | None]:
    if not shapes:
        yield ValueError("shape is a list without any: give one for each group")
    if is_one and mpmd_axis_name not in _sizes(shapes[0]):
        names = ", ".join(map(str, _sizes(shapes[0]))) or "none"
        yield ValueError(f"mpmd_axis_name: the shape has no axis {mpmd_axis_name!r}; its axes are {names}")
    if not is_one and mpmd_axis_name is not None:
        yield ValueError(f"leave out mpmd_axis_name={mpmd_axis_name!r}: a list has a shape for each group")
    for shape in shapes:
        for axis, size in _sizes(shape).items():
            yield str_fault("the name of an axis in shape", axis)
            yield int_fault(f"the size of axis {axis!r} in shape", size)


def _sizes(shape: Shape) -> Mapping[str, int]:
    return shape.shape if isinstance(shape, AbstractMesh) else shape


def _submeshes(shapes: Sequence[Shape], mpmd_axis_name: str | None) -> Iterator[AbstractMesh]:
    types: dict[str, AxisType] = {}
    for shape in shapes:
        known = (
            zip(shape.axis_names, shape.axis_types, strict=True) if isinstance(shape, AbstractMesh) else ()
        )
        types |= dict.fromkeys(_sizes(shape), AxisType.Auto) | dict(known)
    if mpmd_axis_name is not None:
        sizes = _sizes(shapes[0])
        shapes = [{**sizes, mpmd_axis_name: 1}] * sizes[mpmd_axis_name]
    for shape in shapes:
        in_order = tuple(_sizes(shape).get(axis, 1) for axis in types)
        yield AbstractMesh(in_order, tuple(types), tuple(types.values()))
