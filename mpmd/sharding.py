"""Shardings on a group's submesh, and as data."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    use_abstract_mesh,
)

from mpmd.ir.plan import Spec
from mpmd.ir.specs import axes_of

AnyMesh = TypeVar("AnyMesh", bound=Mesh | AbstractMesh)


def to_sharding(entries: Sequence[str | tuple[str, ...] | None], mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*entries))


def for_each_dimension(partition_spec: PartitionSpec, ndim: int) -> list[Any]:
    """The entries of a partition spec, with ``None`` for each dimension behind its last entry."""
    return [*partition_spec, *[None] * (ndim - len(partition_spec))]


WITHOUT_PARTIAL_SUMS = (
    "which has unreduced or reduced axes; leave them out: groups keep partial sums over their devices by "
    "themselves, as partial_sums of mpmd.jit says"
)


def entries_of(partition_spec: PartitionSpec) -> tuple[Any, ...]:
    """The entries of a partition spec, one for each dimension.

    Raises: ``ValueError`` for one with unreduced or reduced axes, which no entry would show.
    """
    if partition_spec.unreduced or partition_spec.reduced:
        raise ValueError(f"a value has the spec {partition_spec}, {WITHOUT_PARTIAL_SUMS}")
    return tuple(partition_spec)


def to_spec(partition_spec: PartitionSpec) -> Spec:
    """A partition spec as plain data, without trailing ``None``s.

    Raises: ``ValueError`` for one with unreduced or reduced axes.
    """
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in entries_of(partition_spec)]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def spec_of(sharding: Sharding, submesh: Mesh, ndim: int) -> Spec:
    """The spec over a submesh of a sharding that XLA chose; ``()``, replicated, if no spec says the same."""
    if isinstance(sharding, NamedSharding):
        return to_spec(sharding.spec)
    axes = [None, *(name for name, size in submesh.shape.items() if size > 1)]
    for entries in itertools.product(axes, repeat=ndim):
        used = [entry for entry in entries if entry is not None]
        if len(used) == len(set(used)):
            candidate = to_sharding(entries, submesh)
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


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def axes_named(sharding: NamedSharding) -> set[str]:
    return axes_of(tuple(entry for entry in sharding.spec if isinstance(entry, str | tuple)))


def explicit_sharding(aval: Any) -> NamedSharding | None:
    sharding = getattr(aval, "sharding", None)
    explicit = isinstance(sharding, NamedSharding) and is_explicit(sharding.mesh)
    return sharding if explicit else None


def described(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=explicit_sharding(aval))


def gathered_along(axis: int, array: Any) -> Any:
    """``array``, resharded where its type shards ``axis``: JAX slices no row of a sharded dimension."""
    sharding = explicit_sharding(jax.typeof(array))
    if sharding is None:
        return array
    entries = for_each_dimension(sharding.spec, array.ndim)
    if entries[axis] is None:
        return array
    entries[axis] = None
    return jax.sharding.reshard(array, to_sharding(entries, sharding.mesh))


def with_auto_axes(mesh: AnyMesh) -> AnyMesh:
    """The mesh with ``Auto`` axes in place of explicit ones: XLA shards values between given specs."""
    if not is_explicit(mesh):
        return mesh
    axis_types = tuple(AxisType.Auto if kind is AxisType.Explicit else kind for kind in mesh.axis_types)
    if isinstance(mesh, AbstractMesh):
        return mesh.update(axis_types=axis_types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types)  # type: ignore[return-value]
