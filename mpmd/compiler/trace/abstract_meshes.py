"""Moves a step from the meshes that the user's functions name to the submesh of whichever group runs it."""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from mpmd.compiler.jaxprs.source import where
from mpmd.errors import CompileError


def with_abstract_meshes(jaxpr: Jaxpr, submesh: AbstractMesh) -> Jaxpr:
    """The jaxpr with abstract meshes where ``shard_map``s and shardings name concrete ones.

    A mesh of as many devices as a group has becomes the group's devices, in their order. A sharding over any
    other mesh, such as that of all groups, is taken over the submesh if that has all the axes it names.

    Raises: ``CompileError`` naming every equation for which neither holds.
    """
    faults: dict[str, None] = {}
    moved = _moved_jaxpr(jaxpr, submesh, faults)
    if faults:
        raise CompileError(list(faults))
    return moved


def _moved_jaxpr(jaxpr: Jaxpr, submesh: AbstractMesh, faults: dict[str, None]) -> Jaxpr:
    eqns = [_moved_eqn(eqn, submesh, faults) for eqn in jaxpr.eqns]
    changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr.replace(eqns=eqns) if changed else jaxpr


def _moved_eqn(eqn: JaxprEqn, submesh: AbstractMesh, faults: dict[str, None]) -> JaxprEqn:
    names_devices = eqn.primitive.name == "shard_map"  # of others a mesh is the context they were traced in

    def moved(value: Any) -> Any:
        match value:
            case Jaxpr():
                return _moved_jaxpr(value, submesh, faults)
            case ClosedJaxpr():
                inner = _moved_jaxpr(value.jaxpr, submesh, faults)
                return value if inner is value.jaxpr else value.replace(jaxpr=inner)
            case tuple() | list() if type(value) in (tuple, list):
                parts = [moved(part) for part in value]
                same = all(new is old for new, old in zip(parts, value, strict=True))
                return value if same else type(value)(parts)
            case Mesh() if not names_devices:
                return value
            case Mesh() if value.size == submesh.size:
                return value.abstract_mesh
            case NamedSharding(mesh=Mesh() as mesh) if mesh.size == submesh.size:
                return NamedSharding(mesh.abstract_mesh, value.spec)
            case NamedSharding(mesh=Mesh()) if _axes(value) <= set(submesh.axis_names):
                return NamedSharding(submesh, value.spec)
            case Mesh() | NamedSharding(mesh=Mesh()):
                faults[_fault(eqn, value, submesh)] = None
        return value

    params = {name: moved(value) for name, value in eqn.params.items()}
    changed = any(params[name] is not eqn.params[name] for name in params)
    return eqn.replace(params=params) if changed else eqn


def _axes(sharding: NamedSharding) -> set[str]:
    entries = [entry for entry in sharding.spec if entry is not None]
    return {axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry)}


def _fault(eqn: JaxprEqn, value: Mesh | NamedSharding, submesh: AbstractMesh) -> str:
    mesh = value if isinstance(value, Mesh) else value.mesh
    return (
        f"{eqn.primitive} at {where(eqn)} is over the mesh {dict(mesh.shape)}, but a group's is "
        f"{dict(submesh.shape)}: leave the mesh out, to mean the group's, or give one of as many devices"
    )
