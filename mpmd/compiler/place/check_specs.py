"""Checks that the specs that the user gave fit the submesh of every group that holds the value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.extend.core import Var
from jax.sharding import AbstractMesh, PartitionSpec

from mpmd.compiler.argument_specs import ArgumentSpecs
from mpmd.compiler.graph import GroupSet, PlacedGraph
from mpmd.compiler.jaxprs.equations import aval_of
from mpmd.errors import CompileError
from mpmd.ir.plan import Spec
from mpmd.ir.specs import axes_of, indivisible
from mpmd.ir.stack import Leaf, per_layer_range

_REMEDY = "leave the axis out of its spec, shard another dimension, or pad this one"


def check_specs(
    placed: PlacedGraph,
    submeshes: Sequence[AbstractMesh],
    specs: ArgumentSpecs,
) -> None:
    """Checks the specs of arguments and results.

    Raises: ``CompileError`` that names every leaf with a dimension that does not divide on a group, and the
      group where not all are alike.
    """
    step = placed.graph.step
    faults: list[str] = []
    axes = _axes_of_layers(step.argument_leaves)
    for argument, spec, axis in zip(step.arguments, specs.arguments, axes, strict=True):
        leaf = f"in_shardings: {argument.path}"
        faults += _faults(leaf, argument.var, spec, placed.homes[argument.var], submeshes, axis)
    axes = _axes_of_layers(step.result_leaves)
    for result, spec_or_open, groups, axis in zip(
        step.results, specs.results, placed.output_groups, axes, strict=True
    ):
        leaf = f"out_shardings: result{result.path}"
        faults += _faults(leaf, result.var, spec_or_open or (), groups, submeshes, axis)
    if faults:
        raise CompileError(faults)


def _axes_of_layers(leaves: Sequence[Leaf]) -> list[int | None]:
    return per_layer_range(leaves, [leaf.stack.axis if leaf.stack else None for leaf in leaves])


def _faults(
    leaf: str,
    var: Var,
    spec: Spec,
    groups: GroupSet,
    submeshes: Sequence[AbstractMesh],
    axis_of_layers: int | None,
) -> Iterator[str]:
    shape = tuple(aval_of(var).shape)
    alike: dict[AbstractMesh, list[int]] = {}
    for group in sorted(groups):
        alike.setdefault(submeshes[group], []).append(group)
    for submesh, numbers in alike.items():
        sizes = dict(submesh.shape)
        where = f"group{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        for dimension, parts in indivisible(spec, shape, sizes):
            axes = ", ".join(map(repr, sorted(axes_of((spec[dimension],)))))
            hint = "it counts layers, so shard another one" if dimension == axis_of_layers else _REMEDY
            yield (
                f"{leaf} with shape {shape} has the spec {PartitionSpec(*spec)}, but dimension {dimension} "
                f"of size {shape[dimension]} does not divide by {parts}, the devices along {axes}, on "
                f"{where}, whose submesh is {sizes}: {hint}"
            )
