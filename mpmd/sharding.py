"""Specs as data to shardings on a group's submesh, and back."""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mpmd.ir import Spec


def to_sharding(spec: Spec, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding that ``spec`` means on a submesh."""
    return NamedSharding(mesh, PartitionSpec(*spec))


def to_spec(partition_spec: PartitionSpec) -> Spec:
    """A partition spec as plain data, without trailing ``None``s."""
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in partition_spec]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)
