"""Checks that the specs that the user gave fit the submesh of every group that holds the value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.extend.core import Var
from jax.sharding import AbstractMesh, PartitionSpec

from mpmd.compiler.graph import GroupSet, PlacedGraph
from mpmd.compiler.jaxprs.equations import aval_of
from mpmd.errors import CompileError
from mpmd.ir import Spec
from mpmd.specs import indivisible
from mpmd.stack import Leaf, per_part


def check_specs(
    placed: PlacedGraph,
    submeshes: Sequence[AbstractMesh],
    in_specs: Sequence[Spec] | None,
    out_specs: Sequence[Spec | None] | None,
) -> None:
    """Checks the specs of arguments and results, ``None`` where there are none.

    Raises: ``CompileError`` that names every leaf with a dimension that does not divide on a group, and the
      group where not all are alike.
    """
    traced = placed.graph.traced
    faults: list[str] = []
    axes = _axes_of_layers(traced.argument_leaves)
    for argument, spec, axis in zip(traced.arguments, in_specs or (), axes, strict=False):
        leaf = f"in_specs: {argument.path}"
        faults += _faults(leaf, argument.var, spec, placed.homes[argument.var], submeshes, axis)
    axes = _axes_of_layers(traced.result_leaves)
    for result, given, groups, axis in zip(
        traced.results, out_specs or (), placed.output_groups, axes, strict=False
    ):
        leaf = f"out_specs: result{result.path}"
        faults += _faults(leaf, result.var, given or (), groups, submeshes, axis)
    if faults:
        raise CompileError(faults)


def _axes_of_layers(leaves: Sequence[Leaf]) -> list[int | None]:
    """For each part of the leaves, which of its dimensions counts layers; ``None`` of leaves in one part."""
    return per_part(leaves, [leaf.stack.axis if leaf.stack else None for leaf in leaves])


def _faults(
    leaf: str,
    var: Var,
    spec: Spec,
    groups: GroupSet,
    submeshes: Sequence[AbstractMesh],
    axis_of_layers: int | None,
) -> Iterator[str]:
    shape = tuple(aval_of(var).shape)
    found: dict[str, None] = {}
    for group in sorted(groups):
        submesh = submeshes[group].shape
        where = "" if len(set(submeshes)) == 1 else f" on group {group}, whose submesh is {dict(submesh)}"
        for dimension, parts in indivisible(spec, shape, submesh):
            size = f"dimension {dimension} of size {shape[dimension]}"
            hint = ": it counts layers, so shard another one" if dimension == axis_of_layers else ""
            found[f"but {size} does not divide by {parts}{where}{hint}"] = None
    for fault in found:
        yield f"{leaf} with shape {shape} has the spec {PartitionSpec(*spec)}, {fault}"
