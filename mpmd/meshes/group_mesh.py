"""Groups of devices as compiling and running a step see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jax.sharding import AbstractMesh

from mpmd.ir.routes import Topology
from mpmd.runtime.protocol import Runtime
from mpmd.validation import shown


class GroupMesh(Protocol):
    """The groups as compiling and running a step see them, wherever they live."""

    @property
    def whole(self) -> GroupMesh:
        """The mesh whose numbers the groups have in arrays and errors: this one, unless it is a part."""
        ...

    @property
    def part_name(self) -> str | None:
        """The name of a part of a mesh; ``None`` for a mesh."""
        ...

    @property
    def mpmd_dim(self) -> int:
        """The number of groups."""
        ...

    @property
    def abstract_submeshes(self) -> tuple[AbstractMesh, ...]:
        """The shape of each group's submesh. All have the same axes and types; the mpmd axis has size 1."""
        ...

    @property
    def mpmd_axis_name(self) -> str | None:
        """The axis along which the groups are; ``None`` where each has a mesh of its own."""
        ...

    @property
    def topology(self) -> Topology:
        """The processes of the groups, which decide the messages between them."""
        ...

    @property
    def runtime(self) -> Runtime:
        """The running groups."""
        ...

    @property
    def recovery_seconds(self) -> Sequence[float]:
        """The duration of each recovery so far."""
        ...


def mesh_fault(name: str, mesh: Any, *, optional: bool = False) -> TypeError | None:
    if (hasattr(mesh, "abstract_submeshes") and not isinstance(mesh, type)) or (optional and mesh is None):
        return None
    return TypeError(
        f"{name} must be mpmd.MpmdMesh(jax_mesh, axis), over this process's devices, what mpmd.launch "
        f"returns, or an mpmd.AbstractMpmdMesh, to plan without devices; not {shown(mesh)}"
    )
