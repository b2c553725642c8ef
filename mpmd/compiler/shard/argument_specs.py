"""Finds out how arguments are sharded, where their callers do not say so."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import AbstractMesh

from mpmd.compiler.jaxprs.equations import aval_of
from mpmd.compiler.steps import CutStep
from mpmd.ir.placement import ANYWHERE, Placement
from mpmd.ir.plan import Spec
from mpmd.ir.specs import indivisible
from mpmd.ir.stack import Leaf


def argument_specs(
    step: CutStep,
    submeshes: Sequence[AbstractMesh],
    in_specs: Sequence[Spec | None] | None,
    out_specs: Sequence[Spec | None] | None,
    held: Sequence[Placement] | None,
) -> list[Spec | None] | None:
    """The spec of each argument: the one given, or else as it is held, or else as it is returned.

    Args:
      in_specs, out_specs: what the caller gave for arguments and results.
      held: where each argument is.

    Returns: ``None`` when nothing is given and all are replicated.
    """
    returned = dict(zip((result.var for result in step.results), out_specs or (), strict=False))
    specs: list[Spec | None] = []
    for i, argument in enumerate(step.arguments):
        spec = in_specs[i] if in_specs else None
        if spec is None:
            spec = _as_held(aval_of(argument.var).shape, held[i] if held else ANYWHERE, submeshes)
        specs.append(returned.get(argument.var) if spec is None else spec)
    return specs if any(specs) or in_specs is not None else None


def fitting_parts(
    leaves: Sequence[Leaf],
    specs: Sequence[Spec | None] | None,
    are_own: Sequence[bool] | None,
    submeshes: Sequence[AbstractMesh],
) -> tuple[Spec | None, ...] | None:
    """The specs of leaves, where arrays whose own spec does not fit all of their parts are replicated.

    Args:
      are_own: which specs are the arrays' own; ``None``: none. Those that were given are left to be refused.
    """
    if specs is None:
        return None

    def fits(leaf: Leaf, spec: Spec) -> bool:
        shapes = leaf.stack.shapes(leaf.shape) if leaf.stack else (leaf.shape,)
        return not any(any(indivisible(spec, shape, mesh.shape)) for shape in shapes for mesh in submeshes)

    fitting = tuple(
        None if own and spec and not fits(leaf, spec) else spec
        for leaf, spec, own in zip(leaves, specs, are_own or [False] * len(leaves), strict=True)
    )
    return fitting if any(fitting) or fitting == tuple(specs) else None


def _as_held(shape: Sequence[int], there: Placement, submeshes: Sequence[AbstractMesh]) -> Spec | None:
    """The spec with which groups hold an array; replicated if one of them does so because it does not fit."""
    if there.spec is None:
        return None
    sizes = (submeshes[group].shape for group in there.mpmd_idxs)
    return () if any(any(indivisible(there.spec, shape, of_group)) for of_group in sizes) else there.spec
