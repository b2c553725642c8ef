"""Groups of devices as compiling and running a step see them."""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh

from mpmd.ir.reshard import GroupShape
from mpmd.ir.routes import Topology
from mpmd.runtime.protocol import Runtime
from mpmd.validation import shown


class GroupMesh(abc.ABC):
    """The base of meshes of groups and of their parts: what compiling and running a step need.

    Attributes:
      part_name: the name of a part of a mesh; ``None`` for a mesh.
      mpmd_axis_name: the axis along which the groups are; ``None`` where each has a mesh of its own.
    """

    part_name: str | None = None
    mpmd_axis_name: str | None

    @property
    def whole(self) -> GroupMesh:
        """The mesh whose numbers the groups have in arrays and errors: this one, unless it is a part."""
        return self

    @property
    @abc.abstractmethod
    def abstract_submeshes(self) -> tuple[AbstractMesh, ...]:
        """The shape of each group's submesh. All have the same axes and types; the mpmd axis has size 1."""

    @property
    def mpmd_dim(self) -> int:
        """The number of groups."""
        return len(self.abstract_submeshes)

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """The number of each group in the whole mesh."""
        return tuple(range(self.mpmd_dim))

    @functools.cached_property
    def numbers(self) -> dict[int, int]:
        """The number of each group here, by its number in the whole mesh."""
        return {group: number for number, group in enumerate(self.mpmd_idxs)}

    @property
    def parts(self) -> Mapping[str, Sequence[int]]:
        """The groups of each part, by its name; empty without parts."""
        return {}

    @functools.cached_property
    def topology(self) -> Topology:
        """The processes of the groups, which decide the messages between them: by default, one for each."""
        return Topology(tuple(GroupShape(dict(submesh.shape)) for submesh in self.abstract_submeshes))

    @property
    @abc.abstractmethod
    def runtime(self) -> Runtime:
        """The running groups."""

    @property
    def recovery_seconds(self) -> Sequence[float]:
        """The duration of each recovery so far; none where groups cannot be replaced."""
        return ()


def mesh_fault(name: str, mesh: Any, *, optional: bool = False) -> TypeError | None:
    if (hasattr(mesh, "abstract_submeshes") and not isinstance(mesh, type)) or (optional and mesh is None):
        return None
    return TypeError(
        f"{name} must be mpmd.MpmdMesh(jax_mesh, axis), over this process's devices, what mpmd.launch "
        f"returns, or an mpmd.AbstractMpmdMesh, to plan without devices; not {shown(mesh)}"
    )
