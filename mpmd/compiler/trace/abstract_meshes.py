"""Moves a step from the meshes that the user's functions name to the submesh of whichever group runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from mpmd.compiler.jaxprs.meshes import axes_named, jaxpr_with_meshes
from mpmd.compiler.jaxprs.source import where
from mpmd.errors import CompileError


def with_abstract_meshes(jaxpr: Jaxpr, submeshes: Sequence[AbstractMesh]) -> Jaxpr:
    """The jaxpr with abstract meshes where ``shard_map``s and shardings name concrete ones.

    A mesh of as many devices as a group has becomes the group's devices, in their order. A sharding over any
    other mesh, such as that of all groups, is taken over the submesh if that has all the axes it names. So is
    one over a group's mesh that lacks axes of size one.

    Raises: ``CompileError`` naming every equation for which neither holds.
    """
    faults: dict[str, None] = {}
    sizes = {submesh.size for submesh in submeshes}
    axis_names = set(submeshes[0].axis_names)

    def abstract(eqn: JaxprEqn, value: Any) -> Any:
        names_devices = eqn.primitive.name == "shard_map"  # of others a mesh is what they were traced in
        match value:
            case Mesh() if not names_devices:
                return value
            case Mesh() if value.size in sizes:
                return value.abstract_mesh
            case NamedSharding(mesh=Mesh() | AbstractMesh() as mesh) if _are_axes_of(value, submeshes[0]):
                return value if mesh == submeshes[0] else NamedSharding(submeshes[0], value.spec)
            case NamedSharding(mesh=Mesh() as mesh) if mesh.size in sizes:
                return NamedSharding(mesh.abstract_mesh, value.spec)
            case NamedSharding(mesh=Mesh()) if axes_named(value) <= axis_names:
                return NamedSharding(submeshes[0], value.spec)
            case Mesh() | NamedSharding(mesh=Mesh()):
                faults[_fault(eqn, value, submeshes)] = None
        return value

    moved = jaxpr_with_meshes(jaxpr, abstract)
    if faults:
        raise CompileError(list(faults))
    return moved


def _are_axes_of(sharding: NamedSharding, submesh: AbstractMesh) -> bool:
    """Whether a sharding's mesh is a submesh, but for axes of size one, outside of a ``shard_map``."""
    mesh = sharding.mesh
    large = {name: size for name, size in submesh.shape.items() if size > 1}
    return (
        AxisType.Manual not in mesh.axis_types
        and axes_named(sharding) <= set(submesh.axis_names)
        and {name: size for name, size in mesh.shape.items() if size > 1} == large
    )


def _fault(eqn: JaxprEqn, value: Mesh | NamedSharding, submeshes: Sequence[AbstractMesh]) -> str:
    mesh = value if isinstance(value, Mesh) else value.mesh
    shapes = dict.fromkeys(str(dict(submesh.shape)) for submesh in submeshes)
    return (
        f"{eqn.primitive} at {where(eqn)} is over the mesh {dict(mesh.shape)}, but a group's is "
        f"{' or '.join(shapes)}: leave the mesh out, to mean the group's, or give one of as many devices"
    )
