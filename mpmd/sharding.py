"""Shardings on a group's submesh, and as data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

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


@contextlib.contextmanager
def within(submesh: AbstractMesh) -> Iterator[None]:
    """The context in which a step is traced: specs without a mesh are over the group's submesh.

    The caller may be within ``jax.set_mesh`` of the whole mesh, for which JAX allows no mesh of another size
    except, first, none.
    """
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(submesh):
        yield
