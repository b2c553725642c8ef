"""Moves equations to the submesh of the group that runs them, where groups have different ones.

A step is traced once, within the first group's submesh. Its equations do not depend on how many devices are
along an axis, but for those with a mesh in their parameters. Of these a sharding over the group's axes means
the same on any submesh with these axes. The function of a ``shard_map`` does not: it was traced for its part
of every array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, NamedSharding

from mpmd.compiler.jaxprs.meshes import axes_named, eqn_with_meshes
from mpmd.compiler.jaxprs.source import where


class GroupMeshes:
    """The submeshes of the groups. ``faults`` collects why equations cannot run where they are to."""

    def __init__(self, submeshes: Sequence[AbstractMesh]):
        self.submeshes = tuple(submeshes)
        self._are_equal = len(set(self.submeshes)) == 1
        self._faults: dict[str, None] = {}

    @property
    def faults(self) -> list[str]:
        return list(self._faults)

    def moved(self, eqns: Iterable[JaxprEqn], mpmd_idx: int) -> list[JaxprEqn]:
        """The equations as they are on a group."""
        if self._are_equal:
            return list(eqns)
        submesh = self.submeshes[mpmd_idx]

        def change(eqn: JaxprEqn, value: Any) -> Any:
            mesh = value.mesh if isinstance(value, NamedSharding) else value
            if not isinstance(mesh, AbstractMesh) or mesh.shape == submesh.shape or mesh.empty:
                return value
            of_groups = mesh.axis_names == submesh.axis_names
            if not of_groups and mesh.size == submesh.size:
                return value  # the group's devices, in their order
            if isinstance(value, AbstractMesh):
                if of_groups and eqn.primitive.name != "shard_map":
                    return submesh
            elif axes_named(value) <= set(submesh.axis_names):
                return NamedSharding(submesh, value.spec)
            self._faults[_fault(eqn, mesh, mpmd_idx, submesh)] = None
            return value

        return [eqn_with_meshes(eqn, change) for eqn in eqns]


def _fault(eqn: JaxprEqn, mesh: AbstractMesh, mpmd_idx: int, submesh: AbstractMesh) -> str:
    return (
        f"{eqn.primitive} at {where(eqn)} was traced for a mesh of {dict(mesh.shape)}, but runs on group "
        f"{mpmd_idx}, whose submesh is {dict(submesh.shape)}"
    )
