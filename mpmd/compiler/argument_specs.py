"""The shardings and places that the caller chooses for a step's arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import AbstractMesh

from mpmd.compiler.jaxprs.equations import aval_of
from mpmd.compiler.request import CompileRequest
from mpmd.compiler.steps import CutStep
from mpmd.ir.placement import ANYWHERE, Placement
from mpmd.ir.plan import Spec
from mpmd.ir.specs import indivisible
from mpmd.ir.stack import Leaf, per_layer_range


@dataclasses.dataclass(frozen=True)
class ArgumentSpecs:
    """The shardings of arguments and results within groups.

    Attributes:
      leaves: for each leaf of the arguments; ``None`` for one, or for all: replicated.
      arguments: for each argument.
      results: for each result; ``None`` for one that is left to the compiler.
      others_are_open: whether the groups' compilers choose the specs of values that no pass knows;
        otherwise these are replicated.
    """

    leaves: tuple[Spec | None, ...] | None
    arguments: tuple[Spec, ...]
    results: tuple[Spec | None, ...]
    others_are_open: bool

    @classmethod
    def replicated(cls, step: CutStep) -> ArgumentSpecs:
        """Returns the specs of a step without ``in_shardings``: every leaf is replicated."""
        return cls(None, ((),) * len(step.arguments), (None,) * len(step.results), False)

    @classmethod
    def of(cls, step: CutStep, request: CompileRequest) -> ArgumentSpecs:
        """Returns the requested specs; without a loop, the specs of arguments serve where none is requested.

        Raises: what ``request.out_specs`` raises.
        """
        leaves = _fitting_ranges(step.argument_leaves, request)
        out_specs = request.out_specs(step.out_shape) if request.out_specs else None
        results = per_layer_range(step.result_leaves, out_specs or [None] * len(step.result_leaves))
        asked = per_layer_range(step.argument_leaves, leaves or [None] * len(step.argument_leaves))
        known = asked if step.loops else _or_held_or_returned(step, asked, results, request)
        is_known = leaves is not None or any(known) or out_specs is not None
        return cls(
            leaves=leaves,
            arguments=tuple(spec or () for spec in known),
            results=tuple(results),
            others_are_open=is_known or any(step.explicit_specs.values()),
        )


@dataclasses.dataclass(frozen=True)
class ArgumentPlacements:
    """The placements of arguments before a step and of results after it; ``ANYWHERE``: the compiler chooses.

    With a loop, whose stages say where everything is, all are ``ANYWHERE``.
    """

    arguments: tuple[Placement, ...]
    results: tuple[Placement, ...]

    @classmethod
    def anywhere(cls, step: CutStep) -> ArgumentPlacements:
        """Returns placements that leave every argument and result to the pass ``place``."""
        return cls((ANYWHERE,) * len(step.arguments), (ANYWHERE,) * len(step.results))

    @classmethod
    def of(cls, step: CutStep, request: CompileRequest) -> ArgumentPlacements:
        """Returns the requested placements; none for a step with loops, which the pass ``place`` decides."""
        if step.loops:
            return cls.anywhere(step)
        arguments = _of_ranges(step.argument_leaves, request.argument_placements)
        return cls(arguments, _of_ranges(step.result_leaves, request.result_placements))


def _of_ranges(leaves: Sequence[Leaf], placements: Sequence[Placement] | None) -> tuple[Placement, ...]:
    """The placement of each layer range of leaves; ``ANYWHERE`` for leaves that are held in other ranges."""
    of_ranges: list[Placement] = []
    for leaf, placement in zip(leaves, placements or [ANYWHERE] * len(leaves), strict=True):
        there = placement if placement.stack == leaf.stack else ANYWHERE
        of_ranges += there.ranges if there.stack else [there] * len(leaf.names)
    return tuple(of_ranges)


def _fitting_ranges(leaves: Sequence[Leaf], request: CompileRequest) -> tuple[Spec | None, ...] | None:
    """The specs of leaves, where arrays whose own spec does not fit all of their layer ranges are replicated.

    Specs that were asked for are left to be refused.
    """
    specs = request.in_specs
    if specs is None:
        return None

    def fits(leaf: Leaf, spec: Spec) -> bool:
        shapes = leaf.stack.shapes(leaf.shape) if leaf.stack else (leaf.shape,)
        return not any(_is_indivisible(spec, shape, request.submeshes) for shape in shapes)

    are_of_arrays = request.specs_are_of_arrays or [False] * len(leaves)
    fitting = tuple(
        None if is_of_array and spec and not fits(leaf, spec) else spec
        for leaf, spec, is_of_array in zip(leaves, specs, are_of_arrays, strict=True)
    )
    return fitting if any(fitting) or fitting == tuple(specs) else None


def _or_held_or_returned(
    step: CutStep,
    asked: Sequence[Spec | None],
    results: Sequence[Spec | None],
    request: CompileRequest,
) -> list[Spec | None]:
    """Returns the spec of each argument: as requested, or else as it is held, or else as it is returned."""
    returned = dict(zip((result.var for result in step.results), results, strict=True))
    held = _of_ranges(step.argument_leaves, request.argument_placements)
    specs: list[Spec | None] = []
    for argument, asked_spec, placement in zip(step.arguments, asked, held, strict=True):
        spec = asked_spec
        if spec is None:
            spec = _as_held(aval_of(argument.var).shape, placement, request.submeshes)
        specs.append(returned.get(argument.var) if spec is None else spec)
    return specs


def _as_held(shape: Sequence[int], there: Placement, submeshes: Sequence[AbstractMesh]) -> Spec | None:
    """Returns the spec with which groups hold an array; ``()`` if it does not divide the array on a group."""
    if there.spec is None:
        return None
    groups = [submeshes[group] for group in there.mpmd_idxs]
    return () if _is_indivisible(there.spec, shape, groups) else there.spec


def _is_indivisible(spec: Spec, shape: Sequence[int], submeshes: Sequence[AbstractMesh]) -> bool:
    """Whether a dimension does not divide by its devices on one of the submeshes."""
    return any(any(indivisible(spec, tuple(shape), submesh.shape)) for submesh in submeshes)
