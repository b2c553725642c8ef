"""Shardings on a group's submesh, and as data."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, use_abstract_mesh

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


def spec_of(sharding: Sharding, submesh: Mesh, ndim: int) -> Spec:
    """How a sharding that XLA chose is written over a submesh; as replicated where no spec says the same."""
    if isinstance(sharding, NamedSharding):
        return to_spec(sharding.spec)
    axes = [None, *(name for name, size in submesh.shape.items() if size > 1)]
    for entries in itertools.product(axes, repeat=ndim):
        used = [entry for entry in entries if entry is not None]
        if len(used) == len(set(used)):
            candidate = NamedSharding(submesh, PartitionSpec(*entries))
            if candidate.is_equivalent_to(sharding, ndim):
                return to_spec(candidate.spec)
    return ()


@contextlib.contextmanager
def within(submesh: AbstractMesh) -> Iterator[None]:
    """The context in which a step is traced: specs without a mesh are over a group's submesh.

    The caller may be within ``jax.set_mesh`` of the whole mesh, for which JAX allows no mesh of another size
    except, first, none.
    """
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(submesh):
        yield
